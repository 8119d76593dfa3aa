"""config.json is read in both spellings that checkpoints use."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from shared.errors import CheckpointError
from shared.layers.rotary import RopeScaling
from shared.models.config import ModelConfig

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "intermediate_size": 96,
    "vocab_size": 100,
    "max_position_embeddings": 256,
}
QWEN3 = LLAMA | {"architectures": ["Qwen3ForCausalLM"], "num_key_value_heads": 2}
MISTRAL = LLAMA | {"architectures": ["MistralForCausalLM"]}


def read(folder: Path, values: dict[str, object], **changes: object) -> ModelConfig:
    (folder / "config.json").write_text(json.dumps(values | changes))
    return ModelConfig.from_folder(folder)


def test_absent_keys_take_the_defaults_of_the_family(tmp_path: Path) -> None:
    llama, qwen3 = read(tmp_path, LLAMA), read(tmp_path, QWEN3)
    assert (llama.num_kv_heads, llama.head_dim, llama.has_qk_norm) == (4, 16, False)
    assert (qwen3.num_kv_heads, qwen3.head_dim, qwen3.has_qk_norm) == (2, 128, True)
    assert llama.rope.theta == 10_000.0
    assert llama.dtype is None


def test_head_dim_set_to_null_divides_the_hidden_size(tmp_path: Path) -> None:
    assert read(tmp_path, LLAMA, head_dim=None).head_dim == 16


def test_both_spellings_of_rope_scaling_mean_the_same(tmp_path: Path) -> None:
    parameters = {"factor": 8.0, "low_freq_factor": 2.0, "original_max_position_embeddings": 32}
    older = read(
        tmp_path, LLAMA, rope_theta=5e5, rope_scaling={"rope_type": "llama3", **parameters}
    )
    oldest = read(tmp_path, LLAMA, rope_theta=5e5, rope_scaling={"type": "llama3", **parameters})
    newer = read(
        tmp_path,
        LLAMA,
        rope_parameters={"rope_type": "llama3", "rope_theta": 5e5, **parameters},
    )
    assert older.rope == oldest.rope == newer.rope
    assert older.rope.scaling is RopeScaling.LLAMA3
    assert (older.rope.theta, older.rope.factor, older.rope.original_length) == (5e5, 8.0, 32)


def test_integers_are_read_as_numbers(tmp_path: Path) -> None:
    config = read(tmp_path, LLAMA, rope_theta=10000, rope_scaling={"type": "linear", "factor": 2})
    assert config.rope.factor == 2.0


@pytest.mark.parametrize(("key", "dtype"), [("dtype", "bfloat16"), ("torch_dtype", "float16")])
def test_dtype_has_two_names(tmp_path: Path, key: str, dtype: str) -> None:
    assert read(tmp_path, LLAMA, **{key: dtype}).dtype is getattr(torch, dtype)


def test_windows_slide_only_when_switched_on(tmp_path: Path) -> None:
    off = read(tmp_path, QWEN3, sliding_window=8, max_window_layers=1)
    late = read(tmp_path, QWEN3, sliding_window=8, max_window_layers=3, use_sliding_window=True)
    named = read(
        tmp_path,
        QWEN3,
        sliding_window=8,
        use_sliding_window=True,
        layer_types=["sliding_attention", "full_attention"] * 2,
    )
    assert off.sliding_windows == (None,) * 4
    assert late.sliding_windows == (None, None, None, 8)
    assert named.sliding_windows == (8, None, 8, None)


@pytest.mark.parametrize(
    ("changes", "window"),
    [({}, 4096), ({"sliding_window": None}, None), ({"sliding_window": 6}, 6)],
)
def test_mistral_slides_unless_the_window_is_null(
    tmp_path: Path, changes: dict[str, object], window: int | None
) -> None:
    assert read(tmp_path, MISTRAL, **changes).sliding_windows == (window,) * 4


def test_end_tokens_come_from_both_files(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [7, 9]}')
    assert read(tmp_path, LLAMA, eos_token_id=2).eos_token_ids == {2, 7, 9}


def test_no_end_token_is_allowed(tmp_path: Path) -> None:
    assert read(tmp_path, LLAMA).eos_token_ids == frozenset()


def test_both_spellings_of_two_kinds_of_layers_mean_the_same(tmp_path: Path) -> None:
    common = LLAMA | {
        "architectures": ["MiMoV2FlashForCausalLM"],
        "num_key_value_heads": 1,
        "head_dim": 12,
        "v_head_dim": 8,
        "attention_value_scale": 0.7,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
    }
    published = read(
        tmp_path,
        common,
        hybrid_layer_pattern=[0, 1, 1, 0],
        moe_layer_freq=[0, 1, 1, 1],
        sliding_window=8,
        sliding_window_size=8,
        swa_num_key_value_heads=2,
        rope_theta=5e6,
        swa_rope_theta=1e4,
        partial_rotary_factor=0.334,
        layernorm_epsilon=1e-5,
        n_shared_experts=None,
        routed_scaling_factor=None,
        architectures=["MiMoV2FlashForCausalLM"],
    )
    rope = {"rope_type": "default", "partial_rotary_factor": 0.334}
    newer = read(
        tmp_path,
        common,
        layer_types=["full_attention", *["sliding_attention"] * 2, "full_attention"],
        mlp_layer_types=["dense", "sparse", "sparse", "sparse"],
        sliding_window=9,
        rope_parameters={
            "full_attention": rope | {"rope_theta": 5e6},
            "sliding_attention": rope | {"rope_theta": 1e4},
        },
        rms_norm_eps=1e-5,
    )
    assert published == newer
    assert published.sliding_windows == (None, 9, 9, None)
    assert [published.layer_kv_heads(layer) for layer in range(4)] == [1, 2, 2, 1]
    assert [published.has_experts(layer) for layer in range(4)] == [False, True, True, True]


def test_a_picture_models_config_is_read_for_its_text_model(tmp_path: Path) -> None:
    scaling = {"type": "linear", "factor": 8}
    text = {"hidden_size": 64, "num_hidden_layers": 7, "intermediate_size": 96, "head_dim": 16}
    config = read(
        tmp_path,
        {
            "architectures": ["Gemma3ForConditionalGeneration"],
            "torch_dtype": "bfloat16",
            "eos_token_id": [1, 106],
        },
        text_config=text | {"sliding_window": 1024, "rope_scaling": scaling},
    )
    assert (config.num_heads, config.num_kv_heads, config.vocab_size) == (8, 4, 262_208)
    assert config.sliding_windows == (1024,) * 5 + (None, 1024)
    assert (config.rope.theta, config.rope.factor) == (1e6, 8.0)
    assert config.sliding_rope is not None
    assert (config.sliding_rope.theta, config.sliding_rope.factor) == (1e4, 1.0)
    assert config.dtype is torch.bfloat16
    assert config.eos_token_ids == {1, 106}


@pytest.mark.parametrize(
    ("changes", "longest"),
    [({}, 8191), ({"attn_temperature_tuning": False}, 8192), ({"attention_chunk_size": 64}, 64)],
)
def test_llama_4_accepts_one_chunk_of_text(
    tmp_path: Path, changes: dict[str, object], longest: int
) -> None:
    experts = {"num_local_experts": 4, "num_experts_per_tok": 1, "attention_chunk_size": 8192}
    llama4 = LLAMA | experts | {"architectures": ["Llama4ForCausalLM"]}
    config = read(tmp_path, llama4, max_position_embeddings=131_072, **changes)
    assert config.max_position_embeddings == longest
    assert config.unrotated_layers == {3}


QWEN = LLAMA | {
    "architectures": ["Qwen3NextForCausalLM"],
    "num_hidden_layers": 8,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
}


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        (
            {"linear_num_value_heads": 24},
            "linear_num_value_heads is 24; it must be a multiple of linear_num_key_heads, 16",
        ),
        ({"linear_num_key_heads": "16"}, "linear_num_key_heads is '16'; it must be of type int"),
        (
            {"layer_types": ["linear_attention"] * 8},
            "layer_types has 8 layers of linear_attention among 8; both kinds are needed",
        ),
        ({"layer_types": ["full_attention"]}, "layer_types has 1 entries for 8 layers"),
        (
            {"layer_types": ["full_attention", *["mamba"] * 7]},
            "layer_types has 8 entries for 8 layers, among them mamba",
        ),
    ],
)
def test_layers_with_states_are_described(
    tmp_path: Path, changes: dict[str, object], problem: str
) -> None:
    config = read(tmp_path, QWEN)
    assert [layer for layer in range(8) if not config.has_state(layer)] == [3, 7]
    assert config.rope.partial == 0.25
    assert config.family.is_gated
    with pytest.raises(CheckpointError, match=problem):
        read(tmp_path, QWEN, **changes)


STEP = LLAMA | {
    "architectures": ["Step3p5ForCausalLM"],
    "num_attention_groups": 2,
    "moe_num_experts": 8,
    "moe_top_k": 2,
    "moe_intermediate_size": 24,
    "sliding_window": 8,
    "layer_types": ["full_attention", *["sliding_attention"] * 3],
}


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"rope_theta": [5e6, 1e4]}, "rope_theta has 2 entries for 4 layers"),
        ({"swiglu_limits": [0.0, 7.0]}, "swiglu_limits has 2 entries for 4 layers"),
        (
            {"attention_other_setting": {"num_attention_heads": 6, "num_attention_groups": 3}},
            "num_attention_groups of attention_other_setting differs from the config's 2",
        ),
    ],
)
def test_layers_of_step_that_are_not_described_are_refused(
    tmp_path: Path, changes: dict[str, object], problem: str
) -> None:
    assert read(tmp_path, STEP).layer_heads(0) == 4
    with pytest.raises(CheckpointError, match=problem):
        read(tmp_path, STEP, **changes)
