"""A decoder cut over two processes computes what the whole one does.

The processes are threads here, which exchange tensors by hand.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from shared.kv.pool import KvPool
from shared.layers.tensor_group import TensorGroup
from shared.models.config import ModelConfig
from shared.models.decoder import Decoder
from shared.models.loader import load_decoder
from shared.models.shard import Shard
from shared.runtime.runner import ModelRunner
from tests.helpers.checkpoints import TinyShape, write_checkpoint
from tests.helpers.plain_forward import plain_forward
from tests.helpers.poisoned import poison_padding
from tests.helpers.rank_batches import NUM_PAGES, PAGE_SIZE, rank_batches
from tests.shared.models.test_decoder_equals_transformers import MIMO_V2, STEP

CPU = torch.device("cpu")
SIZE = 2
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


def _gathers() -> list[Callable[[Tensor, Tensor], object]]:
    """Returns the `gather` of each process's group."""
    barrier, parts = threading.Barrier(SIZE, timeout=30.0), [torch.empty(0)] * SIZE

    def of(rank: int) -> Callable[[Tensor, Tensor], object]:
        def gather(gathered: Tensor, part: Tensor) -> None:
            parts[rank] = part.clone()
            barrier.wait()
            gathered.copy_(torch.cat(parts))
            barrier.wait()

        return gather

    return [of(rank) for rank in range(SIZE)]


DENSE = ("llama", "gemma2", "phi3")


def test_a_dense_model_has_no_experts_to_spread(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, "llama")
    problems = Shard(0, SIZE, True).problems(ModelConfig.from_folder(tmp_path))
    assert problems == ("--ep-size is 2; LlamaForCausalLM has no experts",)


@pytest.mark.parametrize(
    ("family", "spreads_experts"),
    [(f, spreads) for f in CASES for spreads in (False, True) if f not in DENSE or not spreads],
)
def test_parts_add_up_to_the_whole(family: str, spreads_experts: bool, tmp_path: Path) -> None:
    write_checkpoint(tmp_path, family, CASES[family])
    shard = Shard(0, SIZE, spreads_experts)
    assert shard.problems(ModelConfig.from_folder(tmp_path)) == ()
    gathers = _gathers()

    def logits(rank: int) -> Tensor:
        group: Any = TensorGroup(rank, SIZE, gathers[rank], spreads_experts=spreads_experts)
        decoder = load_decoder(tmp_path, dtype=torch.float32, device=CPU, group=group)
        return plain_forward(decoder, TOKENS, range(len(TOKENS))).logits

    with ThreadPoolExecutor(SIZE) as threads:
        first, second = threads.map(logits, range(SIZE))
    whole = load_decoder(tmp_path, dtype=torch.float32, device=CPU)
    expected = plain_forward(whole, TOKENS, range(len(TOKENS))).logits
    assert torch.equal(first, second)
    torch.testing.assert_close(first, expected, rtol=1e-4, atol=1e-4)


# Heads that cannot be cut.
WHOLE_HEADS = {
    "olmo2": TinyShape(),
    "mimo_v2_flash": TinyShape(overrides=MIMO_V2),
    "step3p5": TinyShape(overrides=STEP),
}


def _logits(decoder: Decoder, pool: KvPool) -> list[Tensor]:
    runner = ModelRunner(decoder, poison_padding(pool))
    return [runner.run(batch).logits for batch in rank_batches(CPU)]


@pytest.mark.parametrize("family", CASES | WHOLE_HEADS)
def test_processes_attend_from_sequences_of_their_own(family: str, tmp_path: Path) -> None:
    write_checkpoint(tmp_path, family, (CASES | WHOLE_HEADS)[family])
    spreads_experts = family not in DENSE and family != "olmo2"
    shard = Shard(0, SIZE, spreads_experts, spreads_sequences=True)
    assert shard.problems(ModelConfig.from_folder(tmp_path)) == ()
    gathers = _gathers()

    def logits(rank: int) -> list[Tensor]:
        group: Any = TensorGroup(
            rank, SIZE, gathers[rank], spreads_experts=spreads_experts, spreads_sequences=True
        )
        decoder = load_decoder(tmp_path, dtype=torch.float32, device=CPU, group=group)
        layout = decoder.kv_layout(PAGE_SIZE)
        return _logits(decoder, KvPool(layout, NUM_PAGES, CPU, rank=rank, num_ranks=SIZE))

    with ThreadPoolExecutor(SIZE) as threads:
        first, second = threads.map(logits, range(SIZE))
    whole = load_decoder(tmp_path, dtype=torch.float32, device=CPU)
    expected = _logits(whole, KvPool(whole.kv_layout(PAGE_SIZE), SIZE * NUM_PAGES, CPU))
    for own, other, result in zip(first, second, expected, strict=True):
        assert torch.equal(own, other)
        torch.testing.assert_close(own, result, rtol=1e-4, atol=1e-4)
