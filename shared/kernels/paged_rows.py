"""The rows of a forward, as paged attention takes them."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class PagedRows:
    """The tensors of a forward that attention needs. T rows, B sequences, P pages.

    Attributes:
        positions: `[T]` int64.
        query_starts: `[B + 1]` int32.
        kv_lengths: `[B]` int32.
        prefix_lengths: `[B]` int32.
        page_table: `[B, P]` int32.
        tail_mask: `[T, W]` bool, or None when every row is causal.
        is_causal: `[B]` bool.
        max_query_length: most rows of one sequence.
        max_kv_length: greatest of `kv_lengths`.
        page_size: tokens a page.
        num_prompt_keys: see `ForwardBatch`.
    """

    positions: Tensor
    query_starts: Tensor
    kv_lengths: Tensor
    prefix_lengths: Tensor
    page_table: Tensor
    tail_mask: Tensor | None
    is_causal: Tensor
    max_query_length: int
    max_kv_length: int
    page_size: int
    num_prompt_keys: int = 0
