"""A decoder cut over processes computes what the whole one does.

The processes are threads here, which exchange tensors by hand.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from shared.kv.pool import KvPool
from shared.model_options import AttentionBackend, ModelOptions
from shared.models.config import ModelConfig
from shared.models.decoder import ROUTES, Decoder
from shared.models.loader import load_decoder
from shared.models.shard import Shard
from shared.runtime.runner import ModelRunner, RunnerOutput
from tests.helpers.checkpoints import DELTA, TinyShape, write_checkpoint
from tests.helpers.plain_forward import plain_forward
from tests.helpers.poisoned import poison_padding
from tests.helpers.rank_batches import NUM_PAGES, NUM_RANKS, PAGE_SIZE, rank_batches
from tests.helpers.thread_groups import thread_groups
from tests.shared.models.test_decoder_equals_transformers import MIMO_V2, STEP

CPU = torch.device("cpu")
VOCAB_SIZE = 300
TOKENS = list(range(3, 33))
LATENT = {
    "head_dim": 4,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,
}
EXPERTS = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
}
CASES: dict[str, TinyShape] = {
    "llama": TinyShape(),
    "gemma2": TinyShape(overrides={"sliding_window": 6}),
    "phi3": TinyShape(),
    "mixtral": TinyShape(overrides={"num_local_experts": 4}),
    "qwen3_moe": TinyShape(
        overrides={"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24}
    ),
    "glm4_moe": TinyShape(overrides=EXPERTS | {"attention_bias": True}),
    "llama4": TinyShape(
        overrides={
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "intermediate_size_mlp": 40,
            "interleave_moe_layer_step": 2,
        }
    ),
    "gpt_oss": TinyShape(overrides={"num_local_experts": 4, "num_experts_per_tok": 2}),
    "deepseek_v2": TinyShape(num_kv_heads=4, overrides=EXPERTS | LATENT | {"q_lora_rank": None}),
    "deepseek_v3": TinyShape(num_kv_heads=4, overrides=EXPERTS | LATENT | {"q_lora_rank": 16}),
}

TWO_KINDS = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "sliding_window": 6,
    "layer_types": ["full_attention", "sliding_attention", "full_attention"],
    "mlp_layer_types": ["dense", "sparse", "sparse"],
}
# What has no heads to spread has layers.
ONE_A_STAGE: dict[str, TinyShape] = {
    "olmo2": TinyShape(),
    "mimo_v2_flash": TinyShape(overrides=TWO_KINDS | {"head_dim": 12, "v_head_dim": 8}),
    "step3p5": TinyShape(overrides=TWO_KINDS | {"num_sliding_attention_heads": 8}),
}
RECURRENT = DELTA | {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 24,
}

DENSE = ("llama", "gemma2", "phi3")


def test_a_dense_model_has_no_experts_to_spread(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, "llama")
    problems = Shard(0, 2, True).problems(ModelConfig.from_folder(tmp_path))
    assert problems == ("--ep-size is 2; LlamaForCausalLM has no experts",)


# Tensor-parallel size, stages, whole experts.
CUTS = {"tp 2": (2, 1, False), "ep 2": (2, 1, True), "pp 2": (1, 2, False), "pp 3": (1, 3, False)}
CUTS |= {"pp 2 tp 2": (2, 2, False), "pp 2 ep 2": (2, 2, True)}


def _cases() -> Iterator[tuple[str, str]]:
    for family in (*CASES, *ONE_A_STAGE):
        for cut, (tp_size, _, spreads_experts) in CUTS.items():
            is_right = tp_size == 1 or family in CASES
            if is_right and not (spreads_experts and family in DENSE):
                yield family, cut


@pytest.mark.parametrize(("family", "cut"), [*_cases()])
def test_parts_add_up_to_the_whole(family: str, cut: str, tmp_path: Path) -> None:
    shape = (CASES | ONE_A_STAGE)[family]
    write_checkpoint(tmp_path, family, replace(shape, vocab_size=VOCAB_SIZE))
    config = ModelConfig.from_folder(tmp_path)
    tp_size, pp_size, spreads_experts = CUTS[cut]
    assert Shard(0, tp_size, spreads_experts, num_stages=pp_size).problems(config) == ()
    groups = [
        group.spreading(experts=spreads_experts, sequences=False)
        for group in thread_groups(tp_size, pp_size)
    ]
    layers = tuple(range(config.num_layers, -1, -1))
    if config.experts is not None:
        layers = (*layers, ROUTES)

    def output(group: Any) -> RunnerOutput:
        decoder = load_decoder(tmp_path, dtype=torch.float32, device=CPU, group=group)
        return plain_forward(decoder, TOKENS, range(len(TOKENS)), layers)

    with ThreadPoolExecutor(len(groups)) as threads:
        found = list(threads.map(output, groups))
    expected = output(None)
    for each in found:
        assert torch.equal(each.logits, found[0].logits)
        torch.testing.assert_close(each.logits, expected.logits, rtol=1e-4, atol=1e-4)
        for feature, right in zip(each.features, expected.features, strict=True):
            torch.testing.assert_close(feature, right, rtol=1e-4, atol=1e-4)


def test_the_last_stages_have_the_layers_that_are_left_over(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, shape=TinyShape(num_layers=11))
    config = ModelConfig.from_folder(tmp_path)
    parts = [Shard(stage=stage, num_stages=4).layers(config) for stage in range(4)]
    assert parts == [range(2), range(2, 5), range(5, 8), range(8, 11)]


def test_a_process_has_the_layers_of_its_stage_and_a_part_of_the_vocabulary(
    tmp_path: Path,
) -> None:
    """So that a model fits whose layers one process cannot hold."""
    write_checkpoint(tmp_path, shape=TinyShape(vocab_size=VOCAB_SIZE))
    whole = load_decoder(tmp_path, dtype=torch.float32, device=CPU)
    last = load_decoder(tmp_path, dtype=torch.float32, device=CPU, group=thread_groups(1, 2)[1])
    assert [len(decoder.layers) for decoder in (whole, last)] == [3, 2]
    assert last.kv_layout(4).token_size_bytes * 3 == whole.kv_layout(4).token_size_bytes * 2
    assert torch.equal(last.embedding, whole.embedding[VOCAB_SIZE // 2 :])
    assert torch.equal(
        last.layers[0].attention.output.dense(),  # type: ignore[attr-defined]
        whole.layers[1].attention.output.dense(),  # type: ignore[attr-defined]
    )


def test_stages_that_cannot_be_are_named(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "llama")
    write_checkpoint(tmp_path / "delta", "qwen3_next", TinyShape(overrides=RECURRENT))

    def problems(folder: str, shard: Shard) -> tuple[str, ...]:
        return shard.problems(ModelConfig.from_folder(tmp_path / folder))

    [vocabulary, layers] = problems("llama", Shard(num_stages=4))
    assert layers == "--pp-size is 4; the model has 3 layers, and a stage needs one"
    assert vocabulary == (
        "--tp-size is 1 and --pp-size 4, together 4; the model's vocab_size, 258, is not a "
        "multiple of it"
    )
    [recurrent] = problems("delta", Shard(num_stages=2))
    assert "--pp-size is 2; Qwen3NextForCausalLM has linear attention" in recurrent


@pytest.mark.parametrize("attention", [AttentionBackend.TRITON, AttentionBackend.TORCH])
@pytest.mark.parametrize("family", ["llama", "mimo_v2_flash"])
def test_all_stages_agree_on_graphs_of_prompts(
    family: str, attention: AttentionBackend, tmp_path: Path
) -> None:
    """Also where the layers of one of them have sinks, and those of another have none."""
    shape = replace((CASES | ONE_A_STAGE)[family], vocab_size=VOCAB_SIZE)
    write_checkpoint(tmp_path, family, shape)
    options = ModelOptions(attention_backend=attention)
    for group in (None, *thread_groups(1, 3)):
        decoder = load_decoder(
            tmp_path, dtype=torch.float32, device=CPU, options=options, group=group
        )
        is_planned = family == "llama" and attention is AttentionBackend.TRITON
        assert decoder.plans_prompts_by_size == is_planned


# Heads that cannot be cut.
WHOLE_HEADS = {
    "olmo2": TinyShape(),
    "mimo_v2_flash": TinyShape(overrides=MIMO_V2),
    "step3p5": TinyShape(overrides=STEP),
}


def _outputs(decoder: Decoder, pool: KvPool) -> list[Tensor]:
    """Returns logits, what enters the second layer and leaves the last, and chosen experts."""
    runner = ModelRunner(decoder, poison_padding(pool))
    layers = (1, decoder.config.num_layers)
    if decoder.config.experts is not None:
        layers = (*layers, ROUTES)
    outputs = [runner.run(batch, capture_layers=layers) for batch in rank_batches(CPU)]
    return [each for output in outputs for each in (output.logits, *output.features)]


@pytest.mark.parametrize("pp_size", [1, 2])
@pytest.mark.parametrize("family", CASES | WHOLE_HEADS)
def test_processes_attend_from_sequences_of_their_own(
    family: str, pp_size: int, tmp_path: Path
) -> None:
    shape = (CASES | WHOLE_HEADS)[family]
    write_checkpoint(tmp_path, family, replace(shape, vocab_size=VOCAB_SIZE))
    spreads_experts = family not in DENSE and family != "olmo2"
    shard = Shard(0, NUM_RANKS, spreads_experts, spreads_sequences=True, num_stages=pp_size)
    assert shard.problems(ModelConfig.from_folder(tmp_path)) == ()
    groups = [
        group.spreading(experts=spreads_experts, sequences=True)
        for group in thread_groups(NUM_RANKS, pp_size)
    ]

    def outputs(group: Any) -> list[Tensor]:
        decoder = load_decoder(tmp_path, dtype=torch.float32, device=CPU, group=group)
        layout, rank = decoder.kv_layout(PAGE_SIZE), decoder.shard.rank
        return _outputs(decoder, KvPool(layout, NUM_PAGES, CPU, rank=rank, num_ranks=NUM_RANKS))

    with ThreadPoolExecutor(len(groups)) as threads:
        found = list(threads.map(outputs, groups))
    whole = load_decoder(tmp_path, dtype=torch.float32, device=CPU)
    expected = _outputs(whole, KvPool(whole.kv_layout(PAGE_SIZE), NUM_RANKS * NUM_PAGES, CPU))
    for results in zip(expected, *found, strict=True):
        for each in results[1:]:
            assert torch.equal(each, results[1])
            torch.testing.assert_close(each, results[0], rtol=1e-4, atol=1e-4)
