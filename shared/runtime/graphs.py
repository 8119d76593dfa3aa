"""CUDA graphs of small forwards: plain decode, and verification of trees.

A graph fixes shapes and addresses, not contents. One serves every batch of up to its numbers of
rows and sequences, however rows fall to sequences: queries are ragged inside it as they are
outside. Padding rows touch the padding page alone. Forwards that fit no graph run as they are.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

import torch
from torch import Tensor
from tqdm import tqdm  # type: ignore[import-untyped]

from shared.kernels.split_plan import MAX_PLAIN_ROWS, num_part_rows, num_splits
from shared.kv.batch import ForwardBatch
from shared.kv.pool import KvPool
from shared.kv.state_plan import StatePlan
from shared.models.config import ModelConfig
from shared.models.decoder import Decoder
from shared.runtime.graph_inputs import GraphInputs, GraphLimits
from shared.runtime.graph_store import GraphKey, GraphStore, capturing, key_of, keys_of
from shared.runtime.memory import CacheSize

logger = logging.getLogger(__name__)
# A few sequences, or the tree of one: what a target is asked for first.
_FIRST_ROWS = 8
# Most kinds of features that graphs are kept for; more are computed without.
_MAX_CAPTURE_KINDS = 3
# Of the largest planned step: rows that are computed, rows that draw, and bytes for a token there.
_STEP_ROWS, _DRAWN_ROWS, _DRAWN_BYTES = 8192, 256, 24


@dataclass(frozen=True, slots=True)
class CapturedForward:
    """A graph with the tensors it reads and writes, all of bucket size."""

    graph: torch.cuda.CUDAGraph
    bucket: ForwardBatch
    logits: Tensor
    hidden: Tensor
    features: tuple[Tensor, ...]


class ForwardGraphs:
    """All graphs of one decoder over one pool.

    Results lie in fixed memory: they hold until the next run.

    Args:
        cache: for advice where memory runs out; None knows no settings.
    """

    def __init__(
        self, decoder: Decoder, pool: KvPool, limits: GraphLimits, cache: CacheSize | None = None
    ) -> None:
        assert pool.device.type == "cuda"
        self.limits = limits
        self._decoder = decoder
        self._pool = pool
        self._inputs = GraphInputs(limits, pool.layout, pool.device)
        self._memory = torch.cuda.graph_pool_handle()
        self._graphs = GraphStore(
            self._captured,
            is_shared=decoder.group is not None,
            advise=(cache or CacheSize(pool.storage.nbytes)).advice,
        )
        self._left: list[GraphKey] = []
        self._held: Tensor | None = None

    def capture(
        self,
        capture_layers: tuple[int, ...] = (),
        *,
        has_trees: bool = True,
        show_progress: bool = False,
    ) -> None:
        """Captures every bucket; see `begin`.

        Args:
            has_trees: those for trees as well.
        """
        self.begin(capture_layers, has_trees=has_trees, show_progress=show_progress)
        with tqdm(
            total=len(self._graphs) + len(self._left),
            initial=len(self._graphs),
            desc="CUDA graphs",
            unit="graph",
            disable=None if show_progress else True,
        ) as progress:
            while self.capture_next():
                progress.update()

    def begin(
        self,
        capture_layers: tuple[int, ...] = (),
        *,
        has_trees: bool = True,
        show_progress: bool = False,
    ) -> None:
        """Captures the largest bucket, whose memory the others reuse, and those of a few rows,
        which the first requests meet; leaves the others to `capture_next`. A forward that comes
        before its graph captures it.

        Args:
            capture_layers: those that nearly every forward will want.
        """
        before = torch.cuda.mem_get_info(self._pool.device)[0]
        keys = keys_of(self.limits, capture_layers)
        largest, *others = reversed([key for key in keys if has_trees or not key.has_tail])
        self._left = [key for key in others if key.num_rows > _FIRST_ROWS]
        first = [largest, *(key for key in others if key.num_rows <= _FIRST_ROWS)]
        for key in tqdm(
            first, desc="first CUDA graphs", unit="graph", disable=None if show_progress else True
        ):
            self._graph_of(key)
        taken = (before - torch.cuda.mem_get_info(self._pool.device)[0]) / 2**30
        logger.info(
            "%s CUDA graphs take %.2f GiB; %s are left for later",
            *(len(self._graphs), taken, len(self._left)),
        )

    def capture_next(self) -> bool:
        """Captures one bucket that is left, the smallest first; returns whether one was."""
        while self._left:
            key = self._left.pop()
            if key not in self._graphs:
                return self._graph_of(key) is not None
        return False

    def fits(
        self, batch: ForwardBatch, capture_layers: Sequence[int], plan: StatePlan | None = None
    ) -> bool:
        """Whether a graph can compute `batch`, with what is planned of it for states."""
        limits, has_tail = self.limits, batch.tail_mask is not None
        kinds = {key.capture_layers for key in self._graphs}
        return (
            len(batch.token_ids) <= limits.max_rows
            and len(batch.kv_lengths) <= limits.max_sequences
            and batch.max_kv_length <= limits.max_context_tokens
            and batch.page_table.shape[1] <= self._inputs.num_pages
            and (has_tail or batch.max_query_length <= MAX_PLAIN_ROWS)
            and (batch.tail_mask is None or batch.tail_mask.shape[1] <= limits.max_tail_width)
            and (tuple(capture_layers) in kinds or len(kinds) < _MAX_CAPTURE_KINDS)
            and self._inputs.fits(plan)
        )

    @torch.inference_mode()
    def run(
        self, batch: ForwardBatch, capture_layers: tuple[int, ...], plan: StatePlan | None = None
    ) -> CapturedForward | None:
        """Computes a batch that fits; None where there is no memory for its graph.

        The first run of a size, or with other captured layers, captures it, which takes about as
        long as a hundred steps.
        """
        captured = self._graph_of(key_of(batch, self.limits, capture_layers))
        if captured is not None:
            self._inputs.fill(captured.bucket, batch)
            self._inputs.fill_states(plan)
            captured.graph.replay()
        return captured

    def _graph_of(self, key: GraphKey) -> CapturedForward | None:
        if key not in self._graphs:
            self._held = None
            if self._graphs.of(key) is None:
                self._left.clear()
            else:
                self._hold_memory()
        return self._graphs.of(key)

    def _hold_memory(self) -> None:
        """Holds memory of the size that the graphs that are left will return their results in: a
        draft would make its cache of it."""
        config, itemsize = self._decoder.config, self._decoder.dtype.itemsize
        left = (key for key in self._left if key not in self._graphs)
        size_bytes = sum(
            key.num_rows
            * (
                4 * config.vocab_size
                + (1 + len(key.capture_layers)) * itemsize * config.hidden_size
            )
            for key in left
        )
        # Where there is less, some of them will fit all the same.
        with suppress(torch.OutOfMemoryError):
            self._held = torch.empty(size_bytes, dtype=torch.uint8, device=self._pool.device)

    @torch.inference_mode()
    def _captured(self, key: GraphKey) -> CapturedForward:
        bucket = self._inputs.bucket(key.num_rows, key.num_sequences, has_tail=key.has_tail)
        self._inputs.fill_with_nobody(bucket)
        # Loads kernels and makes the workspaces of products outside of the graph.
        self._forward(bucket, key)
        graph = torch.cuda.CUDAGraph()
        if self._decoder.group is not None:
            self._decoder.group.graphs.append(graph)
        with capturing(graph, self._memory):
            logits, hidden, features = self._forward(bucket, key)
        return CapturedForward(graph, bucket, logits, hidden, features)

    def _forward(
        self, bucket: ForwardBatch, key: GraphKey
    ) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
        states = self._inputs.states(key.num_rows, key.num_sequences, has_tail=key.has_tail)
        output = self._decoder.forward(
            bucket, self._pool, capture_layers=key.capture_layers, states=states
        )
        logits = self._decoder.logits(output.hidden.index_select(0, bucket.logit_rows))
        return logits, output.hidden, output.features


def graph_memory_bytes(config: ModelConfig, limits: GraphLimits, dtype: torch.dtype) -> int:
    """Returns about what the largest graph needs beside weights and cache; others share it."""
    rows = limits.max_rows
    groups = config.num_heads // config.num_kv_heads
    partial = num_splits(limits.max_context_tokens) * (config.head_dim + 2)
    part_rows = num_part_rows(rows, limits.max_sequences, groups)
    attention = part_rows * config.num_heads * partial * 4
    logits = rows * config.vocab_size * (4 + dtype.itemsize)
    blocks = rows * (8 * config.hidden_size + 3 * config.intermediate_size) * dtype.itemsize
    masks = rows * limits.max_tail_width * 9
    return attention + logits + blocks + masks


def step_memory_bytes(decoder: Decoder) -> int:
    """Returns about what the largest planned step needs beside graphs, weights and caches."""
    config, size = decoder.config, 1 if decoder.group is None else decoder.group.size
    wide = 8 * config.hidden_size + 3 * config.intermediate_size // size
    return _STEP_ROWS * wide * 2 + _DRAWN_ROWS * config.vocab_size * _DRAWN_BYTES
