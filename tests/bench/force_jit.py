"""Simulated acceptance on a GPU; see `simulated_rounds.force_path`."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def force_kernel(
    drawn, token_ids, parents, counts, bonus, NUM_ROWS: tl.constexpr, BLOCK: tl.constexpr
):  # type: ignore[no-untyped-def]
    """Lets each row of the path draw its first child, and the last row another token."""
    own = tl.program_id(0) * NUM_ROWS
    rows = tl.arange(0, BLOCK)
    is_node = (rows < NUM_ROWS) & (rows > 0)
    parent = tl.load(parents + own + rows, mask=is_node, other=-1)
    tokens = tl.load(token_ids + own + rows, mask=is_node, other=-1)
    row = 0
    for _ in range(tl.load(counts + tl.program_id(0))):
        child = tl.min(tl.where(parent == row, rows, BLOCK), 0)
        if child < NUM_ROWS:
            tl.store(drawn + own + row, tl.load(token_ids + own + child))
            row = child
    last = tl.load(bonus + tl.program_id(0))
    clashes = tl.max(((parent == row) & (tokens == last)).to(tl.int32), 0)
    tl.store(drawn + own + row, last ^ clashes)


def force_path_fused(
    drawn: Tensor, token_ids: Tensor, parents: Tensor, counts: Tensor, bonus: Tensor
) -> None:
    """See `simulated_rounds.force_path`, in one launch; `counts` is int32."""
    num_rows = drawn.shape[1]
    block = triton.next_power_of_2(num_rows)
    force_kernel[(len(drawn),)](
        drawn, token_ids, parents, counts, bonus, NUM_ROWS=num_rows, BLOCK=block, num_warps=1
    )
