"""The plan of prompt attention, computed once a forward; see `attention_prompts_jit`."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from shared.kernels.paged_rows import PagedRows
from shared.kernels.split_plan import CHUNK_TILE, MAX_PLAIN_ROWS, RowBlocks, cut_of, plain_blocks


@dataclass(frozen=True, slots=True)
class PromptPlan:
    """The prompts of a forward: causal runs of many rows.

    Attributes:
        blocks: of their rows.
        row_lengths: `[T]` int32, keys each row of the forward sees before the window.
        key_starts: `[B]` int64, where the keys of each prompt begin in `key_slots`.
        key_slots: `[S]` int64, the slots of all keys of all prompts, one prompt after the other.
    """

    blocks: RowBlocks
    row_lengths: Tensor
    key_starts: Tensor
    key_slots: Tensor


def has_prompts(batch: PagedRows) -> bool:
    """Whether the host knows of prompts among the rows."""
    return batch.max_query_length > MAX_PLAIN_ROWS and batch.num_prompt_keys > 0


def is_prompt(batch: PagedRows) -> Tensor:
    """Returns `[B]` bool."""
    num_rows = batch.query_starts[1:] - batch.query_starts[:-1]
    return batch.is_causal & (num_rows > MAX_PLAIN_ROWS)


def plan_prompts(batch: PagedRows, row_lengths: Tensor, num_query_groups: int) -> PromptPlan:
    """Computes the plan without waiting for the device."""
    taken = is_prompt(batch)
    num_rows = (batch.query_starts[1:] - batch.query_starts[:-1]) * taken
    cut = cut_of(batch, CHUNK_TILE, num_query_groups, len(batch.positions))
    ends = (batch.kv_lengths * taken).cumsum(0)
    starts = ends - batch.kv_lengths * taken
    keys = torch.arange(batch.num_prompt_keys, device=ends.device)
    sequences = torch.bucketize(keys, ends, right=True)
    indices = keys - starts[sequences]
    pages = batch.page_table[sequences, indices // batch.page_size].long()
    return PromptPlan(
        blocks=plain_blocks(batch.query_starts, num_rows, cut),
        row_lengths=row_lengths,
        key_starts=starts,
        key_slots=pages * batch.page_size + indices % batch.page_size,
    )
