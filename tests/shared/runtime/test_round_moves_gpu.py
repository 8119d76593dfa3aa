"""The kernel that brings accepted keys and values into path order does what the pool does."""

from __future__ import annotations

import random
from typing import cast

import pytest
import torch

from shared.kv.pool import KvLayout, KvPool
from shared.models.decoder import Decoder
from shared.runtime.round_batches import RoundShape
from tests.helpers.kernel_device import kernel_device

verification = pytest.importorskip("shared.runtime.round_fused")

pytestmark = [pytest.mark.gpu, pytest.mark.interpreter]
NUM_PAGES, PAGE_SIZE, NUM_SEQUENCES = 12, 5, 3


def _pool(layout: KvLayout, seed: int) -> KvPool:
    scales = torch.ones(2, layout.num_layers, layout.num_kv_heads) if layout.is_e4m3 else None
    pool = KvPool(layout, NUM_PAGES, kernel_device(), scales)
    generator = torch.Generator().manual_seed(seed)
    pool.storage.copy_(torch.randn(pool.storage.shape, generator=generator))
    return pool


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
@pytest.mark.parametrize(("num_kv_heads", "head_dim"), [(1, 8), (3, 80), (8, 256)])
@pytest.mark.parametrize("width", [1, 4, 6])
def test_paths_move_as_the_pool_moves_them(
    width: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype
) -> None:
    """A path's tokens stay, come from behind, or are each other's places."""
    layout = KvLayout(2, num_kv_heads, head_dim, PAGE_SIZE, dtype)
    expected, found = _pool(layout, 1), _pool(layout, 1)
    rng = random.Random(width)
    slots = rng.sample(range(PAGE_SIZE, NUM_PAGES * PAGE_SIZE), NUM_SEQUENCES * 3 * width)
    sources, targets = [], []
    for first in range(0, len(slots), 3 * width):
        own = slots[first : first + 3 * width]
        # As a path goes down a tree: its nodes stand at or behind their places.
        sources += [own[place + rng.randint(0, 2 * place)] for place in range(width)]
        targets += own[:width]
    on_device = [torch.tensor(each, device=kernel_device()) for each in (sources, targets)]
    expected.move(*on_device)
    fused = verification.FusedRoundVerification(
        cast(Decoder, None), found, cast(RoundShape, None), None, None, None
    )
    fused._move(NUM_SEQUENCES, width, *on_device)
    as_bytes = (pool.storage.view(torch.uint8) for pool in (found, expected))
    assert torch.equal(*as_bytes)
    if width > 1:
        assert not torch.equal(found.storage.float(), _pool(layout, 1).storage.float())
