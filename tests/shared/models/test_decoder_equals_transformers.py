"""The paged decoder computes the logits of transformers on the same weights."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from shared.errors import CheckpointError
from shared.kv.batch import SequenceRows, build_batch
from shared.kv.pool import KvPool
from shared.models.decoder import Decoder
from shared.models.heads.mtp_loader import load_mtp
from shared.models.heads.target_tensors import TargetFolder
from shared.models.loader import load_decoder
from shared.models.shard import Shard
from shared.runtime.runner import ModelRunner
from tests.helpers.checkpoints import DELTA, TinyShape, build_model, write_checkpoint

CPU = torch.device("cpu")
PAGE_SIZE = 4
TOLERANCE = 1e-4
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 100.0,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
}
EXPERTS: dict[str, Any] = {
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
}
GLM: dict[str, Any] = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
}
GPT_OSS: dict[str, Any] = {
    "num_local_experts": 6,
    "num_experts_per_tok": 2,
    "sliding_window": 6,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 150.0,
        "factor": 4.0,
        "original_max_position_embeddings": 16,
        "truncate": False,
    },
}
LATENT: dict[str, Any] = GLM | {
    "head_dim": 4,
    "q_lora_rank": None,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,
    "n_group": 2,
}
MIMO_V2: dict[str, Any] = {
    "head_dim": 12,
    "v_head_dim": 8,
    "attention_value_scale": 0.7,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "sliding_window": 6,
    "layer_types": ["full_attention", "sliding_attention", "full_attention"],
    "mlp_layer_types": ["dense", "sparse", "sparse"],
    "rope_parameters": {
        "full_attention": {
            "rope_type": "default",
            "rope_theta": 500.0,
            "partial_rotary_factor": 0.334,
        },
        "sliding_attention": {
            "rope_type": "default",
            "rope_theta": 50.0,
            "partial_rotary_factor": 0.334,
        },
    },
}
STEP: dict[str, Any] = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "share_expert_dim": 20,
    "moe_router_scaling_factor": 1.7,
    "sliding_window": 6,
    "num_sliding_attention_heads": 6,
    "layer_types": ["full_attention", "sliding_attention", "full_attention"],
    "mlp_layer_types": ["dense", "sparse", "sparse"],
    "rope_parameters": {
        "full_attention": LLAMA3 | {"partial_rotary_factor": 0.5},
        "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
    },
}
STEP_LIMITS: dict[str, Any] = {
    "swiglu_limits": [0.0, 0.3, 0.0],
    "swiglu_limits_shared": [0.2, 0.0, 0.4],
}
QWEN_EXPERTS: dict[str, Any] = {
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 20,
}
LLAMA4: dict[str, Any] = {
    "num_local_experts": 4,
    "num_experts_per_tok": 1,
    "intermediate_size_mlp": 40,
    "no_rope_layer_interval": 2,
}
PHI_LONGROPE = {
    "original_max_position_embeddings": 64,
    "rope_parameters": {
        "rope_type": "longrope",
        "rope_theta": 100.0,
        "partial_rotary_factor": 0.5,
        "short_factor": [1.0, 1.5],
        "long_factor": [3.0, 5.0],
        "original_max_position_embeddings": 64,
    },
}


@dataclass(frozen=True)
class Case:
    family: str
    shape: TinyShape
    max_shard_size: str = "1GB"


def rope(**parameters: Any) -> TinyShape:
    return TinyShape(overrides={"rope_parameters": parameters})


def with_config(**overrides: Any) -> TinyShape:
    return TinyShape(overrides=overrides)


def with_latent(**overrides: Any) -> TinyShape:
    """Latent attention has as many key heads as heads, for all that its cache has one."""
    return TinyShape(num_kv_heads=4, overrides=overrides)


CASES = {
    "llama": Case("llama", TinyShape()),
    "llama tied": Case("llama", TinyShape(tie_word_embeddings=True)),
    "llama without GQA": Case("llama", TinyShape(num_kv_heads=4)),
    "llama with one KV head": Case("llama", TinyShape(num_kv_heads=1)),
    "llama with wide heads": Case("llama", TinyShape(head_dim=16)),
    "llama with attention bias": Case("llama", with_config(attention_bias=True)),
    "llama with MLP bias": Case("llama", with_config(mlp_bias=True)),
    "llama with eps": Case("llama", with_config(rms_norm_eps=0.1)),
    "llama sharded": Case("llama", TinyShape(), max_shard_size="20KB"),
    "llama with theta": Case("llama", rope(rope_type="default", rope_theta=50.0)),
    "llama linear": Case("llama", rope(rope_type="linear", rope_theta=100.0, factor=3.0)),
    "llama llama3": Case("llama", rope(**LLAMA3)),
    "llama yarn": Case("llama", rope(**YARN)),
    "llama yarn with attention factor": Case("llama", rope(**YARN, attention_factor=1.4)),
    "llama yarn with mscale": Case("llama", rope(**YARN, mscale=1.5, mscale_all_dim=0.7)),
    "llama yarn untruncated": Case("llama", rope(**YARN, truncate=False, beta_fast=8.0)),
    "llama dynamic": Case("llama", rope(rope_type="dynamic", rope_theta=100.0, factor=4.0)),
    "mistral": Case("mistral", with_config(sliding_window=None)),
    "mistral sliding": Case("mistral", with_config(sliding_window=7)),
    "qwen2": Case("qwen2", TinyShape()),
    "qwen2 tied": Case("qwen2", TinyShape(tie_word_embeddings=True)),
    "qwen2 sliding": Case(
        "qwen2", with_config(use_sliding_window=True, sliding_window=6, max_window_layers=1)
    ),
    "qwen3": Case("qwen3", TinyShape()),
    "qwen3 with attention bias": Case("qwen3", with_config(attention_bias=True)),
    "qwen3 yarn tied": Case(
        "qwen3", TinyShape(tie_word_embeddings=True, overrides={"rope_parameters": YARN})
    ),
    "qwen3 sliding by layer": Case(
        "qwen3",
        with_config(
            use_sliding_window=True,
            sliding_window=5,
            layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        ),
    ),
    "gemma2": Case("gemma2", with_config(sliding_window=5, query_pre_attn_scalar=12)),
    "gemma2 with low caps": Case(
        "gemma2", with_config(attn_logit_softcapping=0.5, final_logit_softcapping=1.5)
    ),
    "gemma2 tied sharded": Case(
        "gemma2", TinyShape(tie_word_embeddings=True), max_shard_size="20KB"
    ),
    "gemma3": Case(
        "gemma3",
        with_config(
            sliding_window=5,
            layer_types=["sliding_attention", "full_attention", "sliding_attention"],
            rope_parameters={
                "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 500.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
            },
        ),
    ),
    "gemma3 tied": Case("gemma3", TinyShape(tie_word_embeddings=True)),
    "qwen3 moe": Case("qwen3_moe", with_config(**EXPERTS, norm_topk_prob=True)),
    "qwen3 moe not normalised, some layers dense": Case(
        "qwen3_moe", with_config(**EXPERTS, mlp_only_layers=[1])
    ),
    "qwen3 moe sharded": Case("qwen3_moe", with_config(**EXPERTS), max_shard_size="20KB"),
    "mixtral": Case("mixtral", with_config(num_local_experts=6, num_experts_per_tok=2)),
    "glm4 moe": Case("glm4_moe", with_config(**GLM)),
    "glm4 moe with norms and bias": Case(
        "glm4_moe", with_config(**GLM, use_qk_norm=True, attention_bias=True)
    ),
    "glm4 moe in groups, scaled": Case(
        "glm4_moe",
        with_config(**GLM | {"n_group": 4, "topk_group": 2, "routed_scaling_factor": 1.7}),
    ),
    "gpt oss": Case("gpt_oss", with_config(**GPT_OSS)),
    "gpt oss sharded": Case("gpt_oss", with_config(**GPT_OSS), max_shard_size="20KB"),
    "deepseek v2": Case("deepseek_v2", with_latent(**LATENT)),
    "deepseek v2 in groups": Case(
        "deepseek_v2",
        with_latent(
            **LATENT
            | {
                "q_lora_rank": 16,
                "topk_method": "group_limited_greedy",
                "n_group": 4,
                "topk_group": 2,
            }
        ),
    ),
    "deepseek v3": Case("deepseek_v3", with_latent(**LATENT | {"q_lora_rank": 16})),
    "deepseek v3 with bias": Case(
        "deepseek_v3",
        with_latent(**LATENT | {"q_lora_rank": 16, "attention_bias": True, "n_group": 1}),
    ),
    "deepseek v3 not interleaved": Case(
        "deepseek_v3", with_latent(**LATENT | {"rope_interleave": False})
    ),
    "deepseek v3 yarn sharded": Case(
        "deepseek_v3",
        with_latent(
            **LATENT,
            rope_parameters=YARN | {"mscale": 0.7, "mscale_all_dim": 1.3},
        ),
        max_shard_size="20KB",
    ),
    "mimo v2 flash": Case("mimo_v2_flash", with_config(**MIMO_V2)),
    "mimo v2 flash sharded": Case(
        "mimo_v2_flash", with_config(**MIMO_V2, attention_bias=True), max_shard_size="20KB"
    ),
    "step 3.5": Case("step3p5", with_config(**STEP)),
    "step 3.5 with limits, sharded": Case(
        "step3p5", with_config(**STEP, **STEP_LIMITS), max_shard_size="20KB"
    ),
    "qwen3-next": Case("qwen3_next", with_config(**DELTA, **QWEN_EXPERTS)),
    "qwen3-next, some layers dense, heads of their own, tied": Case(
        "qwen3_next",
        TinyShape(
            num_layers=4,
            tie_word_embeddings=True,
            overrides=QWEN_EXPERTS
            | {
                "rms_norm_eps": 0.01,
                "linear_num_key_heads": 1,
                "linear_num_value_heads": 3,
                "linear_key_head_dim": 10,
                "linear_value_head_dim": 8,
                "mlp_only_layers": [1],
                "norm_topk_prob": False,
                "attention_bias": True,
            },
        ),
        max_shard_size="20KB",
    ),
    "qwen3.5": Case("qwen3_5", with_config(**DELTA)),
    "qwen3.5 tied, half rotated": Case(
        "qwen3_5",
        TinyShape(
            tie_word_embeddings=True,
            overrides=DELTA
            | {
                "rope_parameters": {
                    "rope_type": "default",
                    "rope_theta": 100.0,
                    "partial_rotary_factor": 0.5,
                }
            },
        ),
    ),
    "qwen3.5 moe": Case("qwen3_5_moe", with_config(**DELTA, **QWEN_EXPERTS)),
    "llama4": Case("llama4", with_config(**LLAMA4)),
    "llama4 without norms, some layers dense": Case(
        "llama4",
        with_config(**LLAMA4 | {"interleave_moe_layer_step": 2, "use_qk_norm": False}),
    ),
    "llama4 scaled": Case("llama4", with_config(**LLAMA4, rope_parameters=LLAMA3)),
    "phi3": Case("phi3", with_config(sliding_window=6)),
    "phi3 partial": Case(
        "phi3",
        with_config(
            rope_parameters={
                "rope_type": "default",
                "rope_theta": 100.0,
                "partial_rotary_factor": 0.5,
            }
        ),
    ),
    "phi3 longrope": Case("phi3", with_config(**PHI_LONGROPE)),
    "olmo2": Case("olmo2", TinyShape()),
    "olmo2 sharded": Case("olmo2", TinyShape(num_kv_heads=4), max_shard_size="20KB"),
    "olmo3": Case(
        "olmo3",
        with_config(
            sliding_window=6,
            layer_types=["sliding_attention", "full_attention", "sliding_attention"],
            rope_parameters={
                "full_attention": YARN,
                "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
            },
        ),
    ),
}


def prompt(length: int, *, seed: int = 1) -> list[int]:
    return torch.randint(0, 256, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


class PagedSequence:
    """One sequence whose rows are computed in chunks over pages in shuffled order."""

    def __init__(self, token_ids: Sequence[int], pages: Sequence[int]) -> None:
        self.token_ids = token_ids
        self.pages = pages
        self.num_computed = 0

    def rows(self, num_rows: int) -> SequenceRows:
        start = self.num_computed
        end = min(start + num_rows, len(self.token_ids))
        self.num_computed = end
        return SequenceRows.causal(self.token_ids[start:end], start, self.pages, range(end - start))


def shuffled_pages(num_sequences: int, pages_each: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(7)
    order = (1 + torch.randperm(num_sequences * pages_each, generator=generator)).tolist()
    return [order[i * pages_each : (i + 1) * pages_each] for i in range(num_sequences)]


def new_runner(folder: Path, num_pages: int = 64) -> ModelRunner:
    return runner_of(load_decoder(folder, dtype=torch.float32, device=CPU), num_pages)


def runner_of(decoder: Decoder, num_pages: int = 64) -> ModelRunner:
    """Returns a runner with pages of its own."""
    return ModelRunner(decoder, KvPool(decoder.kv_layout(PAGE_SIZE), num_pages, CPU))


def run_in_chunks(runner: ModelRunner, token_ids: list[int], chunk: int) -> Tensor:
    sequence = PagedSequence(token_ids, shuffled_pages(1, 20)[0])
    logits = []
    while sequence.num_computed < len(token_ids):
        batch = build_batch([sequence.rows(chunk)], page_size=PAGE_SIZE, device=CPU)
        logits.append(runner.run(batch).logits)
    return torch.cat(logits)


def assert_close(actual: Tensor, expected: Tensor) -> None:
    assert actual.shape == expected.shape
    assert (actual - expected).abs().max().item() <= TOLERANCE


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Case], Path]:
    def write(case: Case) -> Path:
        folder = tmp_path_factory.mktemp("checkpoint")
        return write_checkpoint(folder, case.family, case.shape, max_shard_size=case.max_shard_size)

    return write


@pytest.mark.parametrize("name", CASES)
def test_logits_equal_transformers(name: str, checkpoint: Callable[[Case], Path]) -> None:
    case = CASES[name]
    token_ids = prompt(43)
    model = build_model(case.family, case.shape)
    with torch.no_grad():
        expected = model(torch.tensor([token_ids])).logits[0]
    decoder = load_decoder(checkpoint(case), dtype=torch.float32, device=CPU)
    for chunk in (len(token_ids), 10, 1):
        assert_close(run_in_chunks(runner_of(decoder), token_ids, chunk), expected)


@pytest.mark.parametrize("name", ["llama", "mistral sliding", "qwen3 sliding by layer"])
def test_ragged_batch_equals_each_sequence_alone(
    name: str, checkpoint: Callable[[Case], Path]
) -> None:
    case = CASES[name]
    model = build_model(case.family, case.shape)
    runner = new_runner(checkpoint(case))
    prompts = [prompt(length, seed=length) for length in (33, 7, 22, 1)]
    sequences = [
        PagedSequence(token_ids, pages)
        for token_ids, pages in zip(prompts, shuffled_pages(4, 9), strict=True)
    ]
    logits: list[list[Tensor]] = [[] for _ in prompts]
    # The last sequence has one token and leaves after the first forward; the others follow.
    for chunks in ((20, 1, 7, 1), (1, 3, 1, 1), (9, 1, 4, 1), (1, 1, 9, 1), (2, 1, 1, 1)):
        alive = [i for i, s in enumerate(sequences) if s.num_computed < len(s.token_ids)]
        rows = [sequences[i].rows(chunks[i]) for i in alive]
        output = runner.run(build_batch(rows, page_size=PAGE_SIZE, device=CPU))
        sizes = [len(r.token_ids) for r in rows]
        for i, part in zip(alive, output.logits.split(sizes), strict=True):
            logits[i].append(part)
    for token_ids, parts in zip(prompts, logits, strict=True):
        with torch.no_grad():
            assert_close(torch.cat(parts), model(torch.tensor([token_ids])).logits[0])


def test_dynamic_rope_beyond_the_original_length_equals_cached_generation(
    checkpoint: Callable[[Case], Path],
) -> None:
    shape = TinyShape(
        max_position_embeddings=16,
        overrides={"rope_parameters": {"rope_type": "dynamic", "rope_theta": 100.0, "factor": 4.0}},
    )
    model = build_model("llama", shape)
    token_ids = prompt(40)
    expected = generated_logits(model, token_ids)
    runner = new_runner(checkpoint(Case("llama", shape)))
    assert_close(run_in_chunks(runner, token_ids, 1), expected)
    assert_close(run_in_chunks(runner, token_ids, 11), expected)


def generated_logits(model: PreTrainedModel, token_ids: list[int]) -> Tensor:
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        rows = [
            model(torch.tensor([[token_id]]), past_key_values=cache).logits[0]
            for token_id in token_ids
        ]
    return torch.cat(rows)


def test_captured_features_are_the_hidden_states_entering_each_layer(
    checkpoint: Callable[[Case], Path],
) -> None:
    case = CASES["llama"]
    token_ids = prompt(12)
    model = build_model(case.family, case.shape)
    with torch.no_grad():
        expected = model(torch.tensor([token_ids]), output_hidden_states=True).hidden_states
    runner = new_runner(checkpoint(case))
    rows = PagedSequence(token_ids, shuffled_pages(1, 4)[0]).rows(12)
    batch = build_batch([rows], page_size=PAGE_SIZE, device=CPU)
    output = runner.run(batch, capture_layers=(2, 0, 1))
    for layer, feature in zip((2, 0, 1), output.features, strict=True):
        assert_close(feature, expected[layer][0])
    assert_close(output.hidden, expected[-1][0])


@pytest.mark.parametrize("root", ["model.language_model.", "language_model.model."])
def test_a_text_model_beside_a_picture_model_is_found(
    root: str, checkpoint: Callable[[Case], Path]
) -> None:
    case = Case("gemma3", TinyShape(tie_word_embeddings=True))
    folder = checkpoint(case)
    plain = run_in_chunks(new_runner(folder), prompt(20), 20)
    tensors = load_file(folder / "model.safetensors")
    nested = {key.replace("model.", root, 1): tensor for key, tensor in tensors.items()}
    nested["vision_tower.patches.weight"] = torch.zeros(2)
    save_file(nested, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    outer = {"architectures": ["Gemma3ForConditionalGeneration"], "text_config": config}
    (folder / "config.json").write_text(json.dumps(outer))
    assert torch.equal(run_in_chunks(new_runner(folder), prompt(20), 20), plain)


@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_5_moe"])
def test_qwen_3_5_is_read_as_it_is_published(
    family: str, checkpoint: Callable[[Case], Path]
) -> None:
    """Beside a picture model and next-token layers, with the experts of a layer as one tensor."""
    has_experts = family.endswith("moe")
    shape = TinyShape(
        tie_word_embeddings=True, overrides=DELTA | (QWEN_EXPERTS if has_experts else {})
    )
    folder = checkpoint(Case(family, shape))
    expected = run_in_chunks(new_runner(folder), prompt(20), 20)
    tensors = load_file(folder / "model.safetensors")
    nested = {
        key.replace("model.", "model.language_model.", 1): tensor
        for key, tensor in tensors.items()
        if ".experts." not in key
    }
    if has_experts:
        for layer in range(3):
            source = f"model.layers.{layer}.mlp.experts."
            target = f"model.language_model.layers.{layer}.mlp.experts."
            gate, up, down = (
                torch.stack([tensors[f"{source}{i}.{name}_proj.weight"] for i in range(8)])
                for name in ("gate", "up", "down")
            )
            nested[f"{target}gate_up_proj"] = torch.cat((gate, up), dim=1)
            nested[f"{target}down_proj"] = down
    nested["model.visual.merger.norm.weight"] = torch.zeros(2)
    nested["mtp.fc.weight"] = torch.zeros(2)
    save_file(nested, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    name = config["architectures"][0].replace("CausalLM", "ConditionalGeneration")
    config["rope_parameters"] |= {"mrope_interleaved": True, "mrope_section": [1, 0, 0]}
    del config["tie_word_embeddings"]
    outer = {"architectures": [name], "text_config": config, "tie_word_embeddings": True}
    (folder / "config.json").write_text(json.dumps(outer))
    runner = new_runner(folder)
    assert torch.equal(run_in_chunks(runner, prompt(20), 20), expected)
    [problem] = Shard(0, 2).problems(runner.decoder.config)
    assert "has linear attention, which cannot be spread" in problem
    target = TargetFolder(folder, dtype=torch.float32, device=CPU)
    with pytest.raises(CheckpointError, match="no next-token layers"):
        load_mtp(folder, target, dtype=torch.float32, device=CPU)


def test_step_is_read_as_it_is_published(checkpoint: Callable[[Case], Path]) -> None:
    """Sizes have other names, and lists go on with next-token layers."""
    shape = with_config(**STEP, **STEP_LIMITS, num_nextn_predict_layers=1)
    folder = checkpoint(Case("step3p5", shape))
    expected = run_in_chunks(new_runner(folder), prompt(20), 20)
    config = json.loads((folder / "config.json").read_text())
    text, rope = config["text_config"], STEP["rope_parameters"]
    kinds = [*STEP["layer_types"], "sliding_attention"]
    full = dict(rope["full_attention"])
    theta, partial = full.pop("rope_theta"), full.pop("partial_rotary_factor")
    is_full = [kind == "full_attention" for kind in kinds]
    same = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    same += ("head_dim", "vocab_size", "max_position_embeddings", "rms_norm_eps")
    same += ("moe_intermediate_size", "share_expert_dim", "sliding_window")
    published = {
        **{key: text[key] for key in same},
        "architectures": ["Step3p5ForCausalLM"],
        "num_attention_groups": text["num_key_value_heads"],
        "attention_other_setting": {"num_attention_heads": 6, "num_attention_groups": 2},
        "moe_num_experts": 8,
        "moe_top_k": 3,
        "moe_router_scaling_factor": 1.7,
        "moe_layers_enum": "1,2",
        "layer_types": kinds,
        "rope_theta": [theta if each else 50.0 for each in is_full],
        "partial_rotary_factors": [partial if each else 1.0 for each in is_full],
        "rope_scaling": full,
        "swiglu_limits": [*STEP_LIMITS["swiglu_limits"], 0.0],
        "swiglu_limits_shared": [*STEP_LIMITS["swiglu_limits_shared"], None],
        "num_nextn_predict_layers": 1,
    }
    (folder / "config.json").write_text(json.dumps(published))
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.3.eh_proj.weight"] = torch.zeros(32, 64)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    runner = new_runner(folder)
    assert torch.equal(run_in_chunks(runner, prompt(20), 20), expected)
    [problem] = Shard(0, 2).problems(runner.decoder.config)
    assert "two kinds of layers, whose heads cannot be spread" in problem
    target = TargetFolder(folder, dtype=torch.float32, device=CPU)
    with pytest.raises(CheckpointError, match=r"lacks model\.layers\.3\.enorm\.weight"):
        load_mtp(folder, target, dtype=torch.float32, device=CPU)


def test_long_factors_hold_beyond_the_original_length(
    checkpoint: Callable[[Case], Path],
) -> None:
    """Rows that all lie beyond it have transformers' keys only if every key has the long ones, so
    the short ones are made equal to them."""
    rope = PHI_LONGROPE["rope_parameters"]
    assert isinstance(rope, dict)
    changed = PHI_LONGROPE | {
        "original_max_position_embeddings": 8,
        "rope_parameters": rope
        | {"short_factor": [3.0, 5.0], "original_max_position_embeddings": 8},
    }
    case = Case("phi3", with_config(**changed))
    token_ids = prompt(43)
    with torch.no_grad():
        expected = build_model(case.family, case.shape)(torch.tensor([token_ids])).logits[0]
    assert_close(run_in_chunks(new_runner(checkpoint(case)), token_ids, 10), expected)
