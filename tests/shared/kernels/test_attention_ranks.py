"""Ranks attend from sequences of their own: together they make what one process makes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from shared.kernels.kernel_settings import IS_INTERPRETING
from shared.kv.batch import ForwardBatch
from shared.kv.pool import KvPool
from shared.layers.attention import Attention
from shared.layers.latent_attention import LatentAttention
from shared.model_options import AttentionBackend
from shared.models.decoder import Decoder
from shared.models.loader import load_decoder
from tests.helpers.checkpoints import TinyShape, write_checkpoint
from tests.helpers.kernel_device import kernel_device, some_interpreted
from tests.helpers.mixtures import MIXTURES
from tests.helpers.poisoned import poison_padding
from tests.helpers.rank_batches import NUM_PAGES, NUM_RANKS, PAGE_SIZE, rank_batches

CPU = torch.device("cpu")
# Of each kind of kernel: splits, single rows with caps or sinks, latent vectors.
FAMILIES = {
    "llama": TinyShape(),
    "gemma2": TinyShape(overrides={"sliding_window": 6}),
    "gpt_oss": TinyShape(overrides={"num_local_experts": 4, "num_experts_per_tok": 2}),
    "deepseek_v3": TinyShape(
        num_kv_heads=4,
        overrides=MIXTURES["deepseek_v3"]
        | {
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            "n_group": 1,
        },
    ),
}

INTERPRETED = ("llama", "gpt_oss", "deepseek_v3")
"""Those that Triton's interpreter runs, too: it takes a minute for some."""


def _attended(decoder: Decoder, batch: ForwardBatch, pool: KvPool) -> Tensor:
    """Returns what the rows of the first layer attend to."""
    size = len(batch.token_ids), decoder.config.hidden_size
    hidden = torch.randn(size, generator=torch.Generator().manual_seed(2)).to(decoder.device)
    context = decoder._context(batch, pool, None, has_routes=False)
    attention = decoder.layers[0].attention
    assert isinstance(attention, Attention | LatentAttention)
    attended = attention._attend(hidden, context)
    return attended if context.own is None else context.own.scatter(attended)


def _check(folder: Path, family: str, device: torch.device, backend: AttentionBackend) -> None:
    write_checkpoint(folder, family, FAMILIES[family])
    decoder = load_decoder(folder, dtype=torch.float32, device=device)
    decoder = replace(decoder, attention_backend=backend)
    layout = decoder.kv_layout(PAGE_SIZE)
    whole = KvPool(layout, NUM_RANKS * NUM_PAGES, device)
    pools = [
        poison_padding(KvPool(layout, NUM_PAGES, device, rank=rank, num_ranks=NUM_RANKS))
        for rank in range(NUM_RANKS)
    ]
    known = rank_batches(device)
    # Again with extents that the host does not know; in the interpreter only the mixed batch.
    again = known[1:2] if IS_INTERPRETING else known
    for batch in (*known, *(replace(each, extents=()) for each in again)):
        expected = _attended(decoder, batch, whole)
        parts = torch.stack([_attended(decoder, batch, pool) for pool in pools])
        torch.testing.assert_close(parts.sum(0), expected, rtol=1e-5, atol=1e-5)
        # Every row is one rank's.
        assert torch.equal((parts != 0).any(-1).sum(0), torch.ones_like(expected[:, 0]).long())


@pytest.mark.parametrize("family", FAMILIES)
def test_each_row_is_of_one_rank(family: str, tmp_path: Path) -> None:
    _check(tmp_path, family, CPU, AttentionBackend.TORCH)


# Beside prompts, rows of nobody are multiplied as memory has them.
@pytest.mark.filterwarnings("ignore:.*encountered in matmul:RuntimeWarning")
@pytest.mark.gpu
@pytest.mark.parametrize(
    "family",
    some_interpreted(FAMILIES, INTERPRETED),
)
def test_kernels_compute_each_row_on_one_rank(family: str, tmp_path: Path) -> None:
    _check(tmp_path, family, kernel_device(), AttentionBackend.AUTO)


@pytest.mark.gpu
def test_one_tile_of_all_sequences_has_each_row_of_one_rank(tmp_path: Path) -> None:
    _check(tmp_path, "llama", kernel_device(), AttentionBackend.TORCH)
