"""CUDA graphs that compute rows of prompts for a draft model's cache."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shared.kv.batch import ForwardBatch
from shared.kv.pool import KvPool
from shared.runtime.graphs import (
    MAX_PROMPT_ROWS,
    MAX_PROMPT_SEQUENCES,
    GraphInputs,
    GraphKey,
    GraphLimits,
    GraphStore,
    capturing,
    prompt_row_buckets,
    unowned_view,
)
from shared.runtime.memory import CacheSize

Compute = Callable[[ForwardBatch, Tensor], Tensor | None]
"""Computes a batch, given the slots `[R]` int64 of its rows in the target's pool. Returns the
contiguous output `[any, R, any]` of the rows; None if nothing reads it."""


@dataclass(frozen=True, slots=True)
class _Captured:
    graph: torch.cuda.CUDAGraph
    bucket: ForwardBatch
    slots: Tensor
    output: Tensor | None


class PromptGraphs:
    """Graphs of one model, by number of rows. They share the memory of intermediate values, so an
    output is valid until the next run of any graph with the same memory.

    Args:
        pool: the model's cache.
        max_context_tokens: longest sequence.
        memory: `torch.cuda.graph_pool_handle` of graphs that never run at the same time.
        stream: see `capturing`.
    """

    def __init__(
        self,
        compute: Compute,
        pool: KvPool,
        max_context_tokens: int,
        memory: Any,
        stream: torch.cuda.Stream | None = None,
    ) -> None:
        self._compute, self._memory, self._stream = compute, memory, stream
        self._limits = GraphLimits(
            max_rows=0,
            max_sequences=MAX_PROMPT_SEQUENCES,
            max_tail_width=0,
            max_context_tokens=max_context_tokens,
            max_prompt_rows=MAX_PROMPT_ROWS,
        )
        self._inputs = GraphInputs(self._limits, pool.layout, pool.device)
        self._slots = torch.zeros(MAX_PROMPT_ROWS, dtype=torch.int64, device=pool.device)
        self._sizes = prompt_row_buckets(self._limits)
        self._graphs = GraphStore(
            self._capture, is_shared=False, advise=CacheSize(pool.storage.nbytes).advice
        )

    def capture(self) -> None:
        """Captures all graphs, the largest first, because the others share its memory."""
        for num_rows in reversed(self._sizes):
            self._graphs.of(num_rows)

    @torch.inference_mode()
    def compute(self, batch: ForwardBatch, slots: Tensor) -> Tensor | None:
        """Computes a batch of causal rows, without a graph if it fits none or memory for one is
        lacking; see `Compute`. The output may have rows behind those of the batch."""
        num_rows = len(batch.token_ids)
        fits = (
            len(batch.kv_lengths) <= self._limits.max_sequences
            and batch.max_kv_length <= self._limits.max_context_tokens
            and batch.page_table.shape[1] <= self._inputs.num_pages
        )
        size = next((size for size in self._sizes if size >= num_rows), None)
        captured = self._graphs.of(size) if fits and size is not None else None
        if captured is None:
            return self._compute(batch, slots)
        self._inputs.fill(captured.bucket, batch)
        captured.slots[:num_rows] = slots
        captured.slots[num_rows:] = 0
        captured.graph.replay()
        return captured.output

    @torch.inference_mode()
    def _capture(self, num_rows: int) -> _Captured:
        num_prompts = min(num_rows, self._limits.max_sequences)
        bucket = self._inputs.bucket(GraphKey(num_rows, num_prompts, False, (), has_prompts=True))
        self._inputs.fill_empty(bucket)
        slots = self._slots[:num_rows]
        # An eager run loads kernels and allocates the workspaces of products outside of the graph.
        self._compute(bucket, slots)
        graph = torch.cuda.CUDAGraph()
        with capturing(graph, self._memory, self._stream):
            output = self._compute(bucket, slots)
        return _Captured(graph, bucket, slots, None if output is None else unowned_view(output))
