"""One pass of a model that grows whole trees of one shape for a batch of sequences.

A pass is a CUDA graph for each number of slots and each kind of sampling, or the same code as it
is: without CUDA, where graphs are not wanted, and where memory does not hold another one.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch
from torch import Tensor

from shared.kernels.split_plan import PLAIN_TILE, num_splits
from shared.models.heads.head import DraftHead
from shared.runtime.graph_store import capturing
from shared.runtime.joined_rows import write_rows
from shared.runtime.open_sequence import OpenArrays, OpenInputs, OpenSequence, OpenSlots
from shared.runtime.round_batches import WALK_LINE, RoundBatches, RoundShape
from shared.runtime.round_sampling import RoundSampling
from shared.runtime.tree_draft import PackedRows, PackedTrees, Part, Parts, TreeDraft, packed
from shared.runtime.tree_model import PassKind, TreeModel
from shared.tokens import TreeShape

logger = logging.getLogger(__name__)
# A graph of so many slots serves fewer sequences nearly as fast as one of their number.
_FEW_SLOTS = 8
_MOST_SPARE = 4
_SLOT_BUCKETS = (1, 2, 4, 8, 16, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)


@dataclass(frozen=True, slots=True)
class PassLimits:
    """Sizes fixed at start.

    Attributes:
        max_sequences: slots of the largest pass.
        max_context_tokens: longest sequence, or window of one, that a pass may start from.
        has_graphs: whether passes are captured.
    """

    max_sequences: int
    max_context_tokens: int
    has_graphs: bool


_Captured: TypeAlias = Sequence[tuple[torch.cuda.CUDAGraph, Part]]
"""Graphs that follow one another, each with what it makes."""


def slot_buckets(max_sequences: int) -> tuple[int, ...]:
    """Returns the numbers of slots that there are graphs for, ascending, `max_sequences` last."""
    return (*(size for size in _SLOT_BUCKETS if size < max_sequences), max_sequences)


class TreePass:
    """Passes of one shape and kind.

    Args:
        memory: of `torch.cuda.graph_pool_handle`, for all graphs of a grower; None without graphs.
    """

    def __init__(
        self,
        model: TreeModel,
        shape: RoundShape,
        limits: PassLimits,
        kind: PassKind,
        *,
        memory: Any,
    ) -> None:
        self._model, self._pool = model, model.pool
        self.shape, self.kind = shape, kind
        self._limits, self._memory = limits, memory
        self.max_open_rows = 1 if kind.is_split else shape.max_committed
        # Graphs read the inputs, and what is beside them, at addresses that never change.
        self._sources = torch.zeros(
            (limits.max_sequences * self.max_open_rows, model.source_width(kind)),
            dtype=model.dtype,
            device=self._pool.device,
        )
        self._slots: dict[int, OpenSlots] = {}
        # Graphs read what its batches hold, too.
        self._captured_draft = self._draft(shape)
        self._captured: dict[tuple[int, RoundSampling], _Captured | None] = {}
        self._buckets = slot_buckets(limits.max_sequences)

    @torch.inference_mode()
    def begin(self, sequences: Sequence[OpenSequence], sources: Sequence[Tensor]) -> Parts:
        """Begins a pass and gives up the one before, unless it has ended.

        Args:
            sequences: at most `max_sequences`, with `max_open_rows` open rows at most.
            sources: what the open rows read beside tokens, end to end, in any pieces
                `[any, width]` on any devices; none for a model that reads tokens alone.
        """
        self._take_sources(sources)
        sampling = RoundSampling.of(each.sampling for each in sequences)
        bucket = self._bucket_for(len(sequences), sampling)
        captured = self._graph_of(bucket, sampling) if self._limits.has_graphs else None
        longest = max(each.length for each in sequences)
        assert longest <= self._limits.max_context_tokens, f"{longest} tokens"
        reach = longest + self._spare
        if captured is None:
            widest = max(each.num_open for each in sequences)
            arrays = self._arrays(sequences, len(sequences), widest, reach)
            shape = replace(self.shape, max_kv_length=reach)
            return self._parts(self._draft(shape), arrays.upload(self._pool.device), sampling)
        self._slots[bucket].fill(self._arrays(sequences, bucket, self.max_open_rows, reach))
        return _replayed(captured)

    @torch.inference_mode()
    def capture_next(self, kinds: Iterable[RoundSampling]) -> bool:
        """Captures a graph that some kinds of sampling may want: those of the most slots first,
        whose memory the others reuse, then the smallest. Returns whether one was left."""
        kinds = dict.fromkeys(map(self._captured_draft.code.kind_of, kinds))
        for num_slots in (self._buckets[-1], *self._buckets):
            for kind in kinds:
                if (num_slots, kind) not in self._captured:
                    self._graph_of(num_slots, kind)
                    return True
        return False

    def left_for(self, num_sequences: int, sampling: RoundSampling) -> list[int]:
        """Returns the slots of the graphs that passes of so many sequences, or fewer, would have to
        capture, the most first. There is one that is not much too large for any number."""
        kind, left = self._captured_draft.code.kind_of(sampling), []
        while num_sequences > 0:
            size = self._bucket_for(num_sequences, sampling)
            if (size, kind) not in self._captured:
                left.append(size)
            num_sequences = (size - 1) // _MOST_SPARE if size > _FEW_SLOTS else 0
        return left

    @torch.inference_mode()
    def capture_for(self, num_sequences: int, sampling: RoundSampling) -> bool:
        """Captures a graph of `left_for`; returns whether one was left."""
        left = self.left_for(num_sequences, sampling)
        if left:
            self._graph_of(left[0], sampling)
        return bool(left)

    def release(self) -> None:
        """Takes back from the group what keeps its graphs alive: this pass is wanted no more."""
        if self._model.group is None:
            return
        for captured in filter(None, self._captured.values()):
            for graph, _ in captured:
                self._model.group.graphs.remove(graph)

    @property
    def is_on_gpu(self) -> bool:
        return self._pool.device.type == "cuda"

    @property
    def num_levels(self) -> int:
        """Levels of nodes that are computed: the leaves are, where it matters what may follow."""
        steps = self.shape.tree.num_steps
        return steps if self.kind.num_choices else steps - 1

    def ends_with(self, part: Part) -> bool:
        """Whether nothing follows what a pass has brought."""
        is_last = not self.kind.num_choices
        return isinstance(part, PackedRows) or (is_last and isinstance(part, PackedTrees))

    @property
    def _walk_size(self) -> tuple[int, int]:
        tree = self.shape.tree
        size = tree.num_steps * tree.topk, WALK_LINE + tree.num_steps
        return size if self.kind.is_walk else (0, 0)

    @property
    def _spare(self) -> int:
        """Indices behind a sequence that a pass may address."""
        num_beam_rows = self.num_levels * self.shape.tree.topk
        return max(self.shape.num_tree_rows, num_beam_rows, self.max_open_rows)

    def _bucket_for(self, num_sequences: int, sampling: RoundSampling) -> int:
        """Returns the slots of a pass: of the smallest graph that is there and not much too large,
        else as few as hold the sequences."""
        sizes = [size for size in self._buckets if size >= min(num_sequences, self._buckets[-1])]
        most = max(_FEW_SLOTS, _MOST_SPARE * num_sequences)
        kind = self._captured_draft.code.kind_of(sampling)
        there = (each for each in sizes if each <= most and self._captured.get((each, kind)))
        return next(there, sizes[0])

    def _num_pages(self, num_tokens: int) -> int:
        return -(-num_tokens // self._pool.page_size)

    def _take_sources(self, pieces: Sequence[Tensor]) -> None:
        if not pieces:
            return
        num_rows = sum(map(len, pieces))
        assert num_rows <= len(self._sources), f"{num_rows} open rows"
        write_rows(pieces, self._sources[:num_rows])

    def _arrays(
        self, sequences: Sequence[OpenSequence], num_slots: int, max_open_rows: int, reach: int
    ) -> OpenArrays:
        """`reach` is how many tokens the page table covers."""
        return OpenArrays.of(
            sequences,
            num_slots=num_slots,
            max_open_rows=max_open_rows,
            num_pages=self._num_pages(reach),
            walk_size=self._walk_size,
        )

    def _draft(self, shape: RoundShape) -> TreeDraft:
        batches = RoundBatches(shape, self._pool.page_size)
        return self._model.draft(batches, self._sources, self.kind)

    def _parts(self, draft: TreeDraft, inputs: OpenInputs, sampling: RoundSampling) -> Parts:
        kind, sources = draft.code.kind_of(sampling), inputs.sources.flatten()
        if self.kind.is_walk:
            yield packed(draft.walk(inputs.state, kind, sources, inputs.walks))
            return
        for part in draft.grow_levels(inputs.state, kind, sources):
            yield packed(part)

    def _graph_of(self, num_slots: int, sampling: RoundSampling) -> _Captured | None:
        """Returns the graph, captured when first asked for; None if it cannot be."""
        key = num_slots, self._captured_draft.code.kind_of(sampling)
        if key not in self._captured:
            try:
                self._captured[key] = self._capture(*key)
            except RuntimeError as error:
                if self._model.group is not None:
                    # The other processes wait for this one in the middle of the graph.
                    logger.critical("no CUDA graph for trees of %d sequences", num_slots)
                    raise
                # What is short of memory while a graph is captured need not be without one.
                self._captured[key] = None
                logger.warning(
                    "no CUDA graph for trees of %d sequences, which run without: %s",
                    *(num_slots, error),
                )
        return self._captured[key]

    def _capture(self, num_slots: int, sampling: RoundSampling) -> _Captured:
        draft, device = self._captured_draft, self._pool.device
        nobody = self._arrays((), num_slots, self.max_open_rows, self.shape.max_kv_length)
        # Loads kernels and makes the workspaces of products outside of the graph, for nobody.
        for _ in self._parts(draft, nobody.upload(device), sampling):
            pass
        if num_slots not in self._slots:
            self._slots[num_slots] = OpenSlots(nobody, device)
        inputs = self._slots[num_slots].inputs
        parts = self._parts(draft, inputs, sampling)
        captured: list[tuple[torch.cuda.CUDAGraph, Part]] = []
        while not captured or not self.ends_with(captured[-1][1]):
            graph = self._new_graph()
            with capturing(graph, self._memory):
                part = next(parts) if self.kind.is_split else _next_result(parts)
            captured.append((graph, part))
        return captured

    def _new_graph(self) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        if self._model.group is not None:
            self._model.group.graphs.append(graph)
        return graph


def _replayed(captured: _Captured) -> Parts:
    for graph, part in captured:
        graph.replay()
        yield part


def _next_result(parts: Parts) -> Part:
    return next(part for part in parts if part is not None)


def num_pass_rows(tree: TreeShape, limits: PassLimits) -> int:
    """Returns the rows of the largest forward of a pass: those that are open, or a level's."""
    return limits.max_sequences * max(tree.num_steps + 1, tree.topk)


def head_memory_bytes(head: DraftHead, tree: TreeShape, limits: PassLimits) -> int:
    """Returns about what the largest graph needs beside weights and cache; others share it."""
    attention, size = head.layers[0].attention.shape, head.dtype.itemsize
    num_rows = num_pass_rows(tree, limits)
    features = 2 * limits.max_sequences * (tree.num_steps + 1) * head.feature_spec.width * size
    partial = num_splits(limits.max_context_tokens) * (attention.head_dim + 2)
    # Each sequence fills its last block of rows up.
    num_groups = attention.num_heads // attention.num_kv_heads
    num_kernel_rows = num_rows + limits.max_sequences * max(PLAIN_TILE // num_groups, 1)
    kernels = num_kernel_rows * attention.num_heads * partial * 4
    logits = limits.max_sequences * tree.topk * head.vocabulary.size * (4 + size)
    # Inputs, states and what the layer makes of them, for as long as the pass goes on.
    blocks = tree.num_steps * num_rows * 16 * head.embedding.shape[1] * size
    return features + kernels + logits + blocks
