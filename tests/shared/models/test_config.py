"""config.json is read in both spellings that checkpoints use."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

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
