"""One pass of a model that grows draft trees of one shape for a batch of sequences.

A pass is a CUDA graph for each number of slots and each kind of sampling. The same code runs
eagerly without CUDA, if graphs are disabled, and if memory does not hold another graph.
"""

from __future__ import annotations

import heapq
import logging
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from shared.kernels.split_plan import PLAIN_TILE, num_splits
from shared.kv.leases import PADDING_PAGE
from shared.kv.upload import Array, UploadBlock, uploaded, uploaded_numbers
from shared.models.heads.head import DraftHead
from shared.runtime.graphs import capturing
from shared.runtime.host_copy import HostCopy, joined_rows, write_rows
from shared.runtime.round_batches import (
    WALK_LINE,
    WALK_PARENT,
    WALK_TOKEN,
    RoundBatches,
    RoundShape,
)
from shared.runtime.round_state import (
    ACTIVE,
    LENGTH,
    OFFSET,
    OPEN,
    SEED,
    TAIL,
    RoundSampling,
    RoundState,
    empty_number_row,
)
from shared.runtime.tree_draft import (
    PackedRows,
    PackedTrees,
    Part,
    Parts,
    RequestScores,
    TreeDraft,
)
from shared.runtime.tree_model import PassKind, TreeModel
from shared.speculation.row_sampling import sampling_columns, signed_seed
from shared.speculation.tree import best_tree
from shared.tokens import SamplingParams, TokenTree, TreeShape

logger = logging.getLogger(__name__)

# A given tree as rows of a pass, which computes its nodes and the candidates after them.


@dataclass(frozen=True, slots=True)
class WalkedTree:
    """A tree and its computed nodes: K in each level, nodes with children first.

    Attributes:
        levels: see `PassTree`. A level with fewer nodes is filled up with rows of token 0 behind
            its first parent, which are computed like all others.
    """

    tree: TokenTree
    levels: tuple[tuple[Sequence[int], Sequence[int]], ...]

    @classmethod
    def of(cls, tree: TokenTree, num_levels: int, topk: int) -> WalkedTree:
        """Lays out a tree of at most this size, see `walked_shape`."""
        inner, paths = set(tree.parent_indices), _path_scores(tree)
        by_depth: list[list[int]] = [[] for _ in range(num_levels)]
        for node, depth in enumerate(tree.depths):
            by_depth[depth - 1].append(node)
        levels: list[tuple[list[int], list[int]]] = []
        places: dict[int | None, int] = {None: 0}
        for nodes in by_depth:
            kept = heapq.nsmallest(topk, nodes, key=lambda node: (node not in inner, -paths[node]))
            num_missing = topk - len(kept)
            parents = [places[tree.parent_indices[node]] for node in kept]
            levels.append(
                ([*(tree.token_ids[node] for node in kept), *[0] * num_missing],
                 [*parents, *[0] * num_missing])
            )  # fmt: skip
            places = {node: place for place, node in enumerate(kept)}
        return cls(tree, tuple(levels))

    def numbers(self) -> Array:
        """Returns `[L * K, 2 + L]` int64, level by level: the token of each node, the place of its
        parent in the level before, and the rows on its path, its own repeated at the end."""
        num_levels, topk = len(self.levels), len(self.levels[0][0])
        numbers = np.empty((num_levels * topk, WALK_LINE + num_levels), np.int64)
        for level, (token_ids, parents) in enumerate(self.levels):
            first = level * topk
            rows = slice(first, first + topk)
            numbers[rows, WALK_TOKEN], numbers[rows, WALK_PARENT] = token_ids, parents
            if level:
                above = first - topk + np.array(parents)
                numbers[rows, WALK_LINE:] = numbers[above, WALK_LINE:]
            numbers[rows, WALK_LINE + level :] = np.arange(first, first + topk)[:, None]
        return numbers


def walked_shape(tree: TokenTree, shape: TreeShape) -> TreeShape:
    """Returns the shape of passes that walk a tree: `shape`, deeper or wider where the tree needs
    it."""
    depths = tree.depths
    inner = Counter(depths[node] for node in set(tree.parent_indices) if node is not None)
    num_steps = max((shape.num_steps, *depths))
    topk = max((shape.topk, *inner.values()))
    return TreeShape(num_steps, topk, max(shape.num_draft_tokens, num_steps + 1))


def _path_scores(tree: TokenTree) -> list[float]:
    """Returns the score of the path to each node; without scores, minus the node's depth."""
    scores: list[float] = []
    for node, parent in enumerate(tree.parent_indices):
        own = tree.log_probs[node] if tree.log_probs else -1.0
        scores.append(own + (0.0 if parent is None else scores[parent]))
    return scores


# Inputs of the sequences of one pass, laid out for the device.

_GREEDY_COLUMNS = sampling_columns(SamplingParams(temperature=0.0))


@dataclass(frozen=True, slots=True)
class OpenSequence:
    """One sequence with its open rows, those that are not computed yet.

    Attributes:
        token_ids: tokens that the open rows read, the last committed one included; at least one.
        num_computed: number of computed rows before the open rows.
        num_before: position of the token that the first row reads, less 1. A head's first row
            reads the second token of its window, a language model's the first one.
        pages: in logical order; they cover the open rows and the rows of the tree.
        walk: the tree that a pass computes behind the open rows instead of growing one.
    """

    token_ids: Sequence[int]
    num_computed: int
    num_before: int
    sampling: SamplingParams
    pages: Sequence[int]
    walk: WalkedTree | None = None

    @property
    def length(self) -> int:
        """One more than the number of committed rows."""
        return self.num_computed + len(self.token_ids) + 1


@dataclass(frozen=True, slots=True, eq=False)
class OpenInputs:
    """The inputs of S slots.

    Attributes:
        state: both page tables are the same tensor.
        sources: `[S, W]` int64, see `DraftCode.forwards`.
        walks: `[S, any, any]` int64, see `WalkedTree.numbers`; empty where trees grow.
    """

    state: RoundState
    sources: Tensor
    walks: Tensor

    @classmethod
    def of(cls, tensors: Sequence[Tensor], table: Tensor) -> OpenInputs:
        """Builds inputs from the tensors of `OpenArrays.fixed` and `OpenArrays.table`."""
        numbers, columns, sources, walks = tensors
        return cls(RoundState(numbers, columns.view(torch.float64), table, table), sources, walks)


@dataclass(frozen=True, slots=True, eq=False)
class OpenArrays:
    """`OpenInputs` in host memory.

    Attributes:
        fixed: numbers and sampling of the slots, sources, walks.
        table: `[S, P]` int32, the page table.
    """

    fixed: Sequence[Array]
    table: Array

    @classmethod
    def of(
        cls,
        sequences: Sequence[OpenSequence],
        *,
        num_slots: int,
        max_open_rows: int,
        num_pages: int,
        walk_size: tuple[int, int],
    ) -> OpenArrays:
        """Lays out sequences in the first of `num_slots` slots.

        Args:
            max_open_rows: W, most open rows of a sequence.
            num_pages: P, pages of each row of the page table.
            walk_size: shape of `WalkedTree.numbers`; zeros where trees grow.
        """
        num_empty = num_slots - len(sequences)
        rows = [_number_row(sequence, max_open_rows) for sequence in sequences]
        numbers = np.array([*rows, *[empty_number_row(max_open_rows)] * num_empty], np.int64)
        sampling = [sampling_columns(sequence.sampling) for sequence in sequences]
        columns = np.array([*sampling, *[_GREEDY_COLUMNS] * num_empty], np.float64)
        table = np.full((num_slots, num_pages), PADDING_PAGE, np.int32)
        walks = np.zeros((num_slots, *walk_size), np.int64)
        for slot, sequence in enumerate(sequences):
            pages = sequence.pages[:num_pages]
            table[slot, : len(pages)] = pages
            if sequence.walk is not None:
                walks[slot] = sequence.walk.numbers()
        sources = np.zeros((num_slots, max_open_rows), np.int64)
        # Slot by slot, the open rows read consecutive source rows.
        is_open = np.arange(max_open_rows) < numbers[: len(sequences), OPEN, None]
        sources[: len(sequences)][is_open] = np.arange(np.count_nonzero(is_open))
        return cls((numbers, columns.view(np.int64), sources, walks), table)

    def upload(self, device: torch.device) -> OpenInputs:
        """Returns the inputs on the device, without waiting for the copy."""
        *fixed, table = uploaded((*self.fixed, self.table), device)
        return OpenInputs.of(fixed, table)


class OpenSlots:
    """Inputs at fixed addresses, of slots that are empty at first.

    Args:
        empty: arrays of the largest sizes; no page table may be wider.
    """

    def __init__(self, empty: OpenArrays, device: torch.device) -> None:
        self._block = UploadBlock(empty.fixed, empty.table, device)
        [self._table] = uploaded([empty.table], device)
        self.inputs = OpenInputs.of(self._block.tensors, self._table)

    def fill(self, arrays: OpenArrays) -> None:
        """Queues a copy of arrays of as many slots into the inputs."""
        pages = self._block.fill(arrays.fixed, arrays.table)
        self._table[:, : pages.shape[1]].copy_(pages)


def _number_row(sequence: OpenSequence, max_open_rows: int) -> list[int]:
    row, count = empty_number_row(max_open_rows), len(sequence.token_ids)
    assert 1 <= count <= max_open_rows, f"{count} open rows; a pass takes {max_open_rows}"
    row[LENGTH], row[OPEN], row[ACTIVE] = sequence.length, count, 1
    row[SEED], row[OFFSET] = signed_seed(sequence.sampling.seed), sequence.num_before
    row[TAIL : TAIL + count] = sequence.token_ids
    return row


# A graph of this many slots, or this multiple of the sequences, is nearly as fast as an exact one.
_FEW_SLOTS = 8
_MAX_SLOTS_A_SEQUENCE = 4
_SLOT_BUCKETS = (1, 2, 4, 8, 16, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)


@dataclass(frozen=True, slots=True)
class PassLimits:
    """Sizes fixed at start-up.

    Attributes:
        max_sequences: slots of the largest pass.
        max_context_tokens: longest sequence, or window of a sequence, that a pass may start from.
        has_graphs: whether passes are captured in CUDA graphs.
    """

    max_sequences: int
    max_context_tokens: int
    has_graphs: bool


GraphKey: TypeAlias = tuple[int, RoundSampling]
"""Number of slots, and kind of sampling."""
_Captured: TypeAlias = Sequence[tuple[torch.cuda.CUDAGraph, Part]]
"""Consecutive graphs, each with its result."""


def slot_buckets(max_sequences: int) -> tuple[int, ...]:
    """Returns the numbers of slots that graphs have, ascending, `max_sequences` last."""
    return (*(size for size in _SLOT_BUCKETS if size < max_sequences), max_sequences)


class TreePass:
    """Passes of one shape and kind.

    Args:
        memory: `torch.cuda.graph_pool_handle` of all graphs of a grower; None without graphs.
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
        self._has_graphs = limits.has_graphs and not kind.is_plain
        # Graphs read the inputs and the source rows at fixed addresses.
        num_rows = limits.max_sequences * self.max_open_rows if self._has_graphs else 0
        self._sources = torch.zeros(
            (num_rows, model.source_width(kind)), dtype=model.dtype, device=self._pool.device
        )
        self._slots: dict[int, OpenSlots] = {}
        # Kept, because graphs also read the tensors of its batches.
        self._captured_draft = self._draft(shape, self._sources)
        self._captured: dict[GraphKey, _Captured | None] = {}
        self._buckets = slot_buckets(limits.max_sequences)

    @torch.inference_mode()
    def begin(
        self,
        sequences: Sequence[OpenSequence],
        sources: Sequence[Tensor],
        scores: RequestScores | None = None,
    ) -> Parts:
        """Begins a pass and gives up the one before, unless it has ended.

        Args:
            sequences: at most `max_sequences`, with `max_open_rows` open rows at most.
            sources: input of the open rows beside tokens, end to end, in any pieces
                `[any, width]` on any devices; empty for a model that reads only tokens.
            scores: scores of a plain pass.
        """
        sampling = RoundSampling.of(sequence.sampling for sequence in sequences)
        bucket = self._bucket_for(len(sequences), sampling)
        captured = self._graph_of(bucket, sampling) if self._has_graphs else None
        longest = max(sequence.length for sequence in sequences)
        assert longest <= self._limits.max_context_tokens, f"{longest} tokens"
        # The KV indices that a pass may address.
        num_beam_rows = self.num_levels * self.shape.tree.topk
        kv_length = longest + max(self.shape.num_tree_rows, num_beam_rows, self.max_open_rows)
        if captured is None:
            widest = max(len(sequence.token_ids) for sequence in sequences)
            arrays = self._arrays(sequences, len(sequences), widest, kv_length)
            device, read = self._pool.device, self._sources
            if sources:
                read = joined_rows(sources, device).to(self._model.dtype)
            draft = self._draft(replace(self.shape, max_kv_length=kv_length), read)
            return self._parts(replace(draft, scores=scores), arrays.upload(device), sampling)
        if sources:
            write_rows(sources, self._sources[: sum(map(len, sources))])
        self._slots[bucket].fill(self._arrays(sequences, bucket, self.max_open_rows, kv_length))
        return _replayed(captured)

    def uncaptured(self, kinds: Iterable[RoundSampling]) -> list[GraphKey]:
        """Returns the uncaptured graphs for some kinds of sampling: those of the most slots first,
        whose memory the others reuse, then the others in ascending order."""
        kinds = dict.fromkeys(map(self._captured_draft.code.kind_of, kinds))
        keys = [(size, kind) for size in (self._buckets[-1], *self._buckets) for kind in kinds]
        return [key for key in keys if key not in self._captured]

    def uncaptured_for(self, num_sequences: int, sampling: RoundSampling) -> list[GraphKey]:
        """Returns the graphs that passes of up to `num_sequences` still have to capture, the
        largest first. With them every number has a graph that is not much too large."""
        kind, keys = self._captured_draft.code.kind_of(sampling), []
        while num_sequences > 0:
            size = self._bucket_for(num_sequences, sampling)
            if (size, kind) not in self._captured:
                keys.append((size, kind))
            num_sequences = (size - 1) // _MAX_SLOTS_A_SEQUENCE if size > _FEW_SLOTS else 0
        return keys

    @torch.inference_mode()
    def capture_first(self, keys: Sequence[GraphKey]) -> bool:
        """Captures the first of the graphs; returns whether there was any."""
        if keys:
            self._graph_of(*keys[0])
        return bool(keys)

    def release(self) -> None:
        """Removes the graphs of a discarded pass from the group, which keeps them alive."""
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
        """Levels of computed nodes; the leaves are computed only for the candidates after them."""
        steps = self.shape.tree.num_steps
        return steps if self.kind.num_choices else steps - 1

    def ends_with(self, part: Part) -> bool:
        """Whether a part is the last of a pass."""
        is_last = not self.kind.num_choices
        return isinstance(part, PackedRows) or (is_last and isinstance(part, PackedTrees))

    def _bucket_for(self, num_sequences: int, sampling: RoundSampling) -> int:
        """Returns the slots of a pass: those of the smallest captured graph that is not much too
        large, else of the smallest bucket that holds the sequences."""
        sizes = [size for size in self._buckets if size >= min(num_sequences, self._buckets[-1])]
        most = max(_FEW_SLOTS, _MAX_SLOTS_A_SEQUENCE * num_sequences)
        kind = self._captured_draft.code.kind_of(sampling)
        captured = (size for size in sizes if size <= most and self._captured.get((size, kind)))
        return next(captured, sizes[0])

    def _arrays(
        self, sequences: Sequence[OpenSequence], num_slots: int, max_open_rows: int, kv_length: int
    ) -> OpenArrays:
        """Lays out sequences with page tables that cover `kv_length` tokens."""
        tree = self.shape.tree
        return OpenArrays.of(
            sequences,
            num_slots=num_slots,
            max_open_rows=max_open_rows,
            num_pages=-(-kv_length // self._pool.page_size),
            walk_size=(tree.num_steps * tree.topk, WALK_LINE + tree.num_steps)
            if self.kind.is_walk
            else (0, 0),
        )

    def _draft(self, shape: RoundShape, sources: Tensor) -> TreeDraft:
        batches = RoundBatches(shape, self._pool.page_size)
        return TreeDraft(self._model.code(batches, sources, self.kind), self.kind.num_choices)

    def _parts(self, draft: TreeDraft, inputs: OpenInputs, sampling: RoundSampling) -> Parts:
        kind, sources = draft.code.kind_of(sampling), inputs.sources.flatten()
        if self.kind.is_walk:
            yield draft.walk(inputs.state, kind, sources, inputs.walks)
        else:
            yield from draft.grow_levels(inputs.state, kind, sources)

    def _graph_of(self, num_slots: int, sampling: RoundSampling) -> _Captured | None:
        """Returns a graph, which its first use captures; None if the capture failed."""
        key = num_slots, self._captured_draft.code.kind_of(sampling)
        if key not in self._captured:
            try:
                self._captured[key] = self._capture(*key)
            except RuntimeError as error:
                if self._model.group is not None:
                    # The other ranks wait for this one in the middle of the graph.
                    logger.critical("no CUDA graph for trees of %d sequences", num_slots)
                    raise
                # A pass that runs out of memory during capture may still fit without a graph.
                self._captured[key] = None
                logger.warning(
                    "no CUDA graph for trees of %d sequences; they run without one: %s",
                    *(num_slots, error),
                )
        return self._captured[key]

    def _capture(self, num_slots: int, sampling: RoundSampling) -> _Captured:
        draft, device = self._captured_draft, self._pool.device
        empty = self._arrays((), num_slots, self.max_open_rows, self.shape.max_kv_length)
        # A pass of empty slots loads kernels and allocates workspaces outside of the graph.
        for _ in self._parts(draft, empty.upload(device), sampling):
            pass
        if num_slots not in self._slots:
            self._slots[num_slots] = OpenSlots(empty, device)
        inputs = self._slots[num_slots].inputs
        parts = self._parts(draft, inputs, sampling)
        captured: list[tuple[torch.cuda.CUDAGraph, Part]] = []
        while not captured or not self.ends_with(captured[-1][1]):
            graph = torch.cuda.CUDAGraph()
            with capturing(graph, self._memory, group=self._model.group):
                part = next(part for part in parts if self.kind.is_split or part is not None)
            captured.append((graph, part))
        return captured


def _replayed(captured: _Captured) -> Parts:
    for graph, part in captured:
        graph.replay()
        yield part


def num_pass_rows(tree: TreeShape, limits: PassLimits) -> int:
    """Returns the rows of the largest forward of a pass: its open rows, or one level."""
    return limits.max_sequences * max(tree.num_steps + 1, tree.topk)


def head_memory_bytes(head: DraftHead, tree: TreeShape, limits: PassLimits) -> int:
    """Estimates the memory of the largest graph beside weights and cache; other graphs share it."""
    attention, size = head.layers[0].attention.shape, head.dtype.itemsize
    num_rows = num_pass_rows(tree, limits)
    features = 2 * limits.max_sequences * (tree.num_steps + 1) * head.feature_spec.width * size
    partial = num_splits(limits.max_context_tokens) * (attention.head_dim + 2)
    # The kernel pads each sequence to whole blocks of rows.
    num_groups = attention.num_heads // attention.num_kv_heads
    num_kernel_rows = num_rows + limits.max_sequences * max(PLAIN_TILE // num_groups, 1)
    kernels = num_kernel_rows * attention.num_heads * partial * 4
    logits = limits.max_sequences * tree.topk * head.vocabulary.size * (4 + size)
    # Inputs, states and intermediate results of the layer, kept until the pass ends.
    blocks = tree.num_steps * num_rows * 16 * head.embedding.shape[1] * size
    return features + kernels + logits + blocks


# The trees of a pass under way, and their results on the host.


@dataclass(frozen=True, slots=True)
class PassTree:
    """The results of a pass for one sequence.

    Attributes:
        levels: for each level the tokens of its computed nodes, and the places of their parents in
            the level before.
        rows: computed rows: the root's, then one for each of these nodes.
    """

    tree: TokenTree
    levels: tuple[tuple[Sequence[int], Sequence[int]], ...]
    rows: PassRows


class PassRows:
    """The computed rows of one sequence; the device may still be computing them."""

    def __init__(self, growing: GrowingTrees, place: int) -> None:
        self._growing, self._place = growing, place

    def after(self, row: int) -> tuple[tuple[int, float], ...]:
        """Returns the candidate tokens after one row with their scores, best first; waits for the
        device. Empty if the pass looked for none, or was given up."""
        return self._growing.choices(self._place, row)

    @staticmethod
    def states(rows: Iterable[tuple[PassRows, int]]) -> list[Tensor]:
        """Returns the states `[any, H]` of some rows, which their child rows read, end to end in a
        few pieces; waits for nothing."""
        return [
            growing.states([(own._place, row) for own, row in group])
            for growing, group in groupby(rows, key=lambda pair: pair[0]._growing)
        ]


class GrowingTrees:
    """Trees of a pass under way.

    Args:
        max_nodes: most nodes of a tree.
    """

    def __init__(self, parts: Parts, num_sequences: int, grown: TreePass, max_nodes: int) -> None:
        self._parts, self._num_sequences = parts, num_sequences
        self._pass, self._max_nodes = grown, max_nodes
        self._trees: HostCopy | None = None
        self._choices: HostCopy | None = None
        self._states: Tensor | None = None
        self._host_choices: tuple[list[list[int]], list[list[float]]] | None = None
        self._is_queued, self._num_queued = False, 0
        self._part: torch.cuda.Event | None = None

    @property
    def has_trees(self) -> bool:
        """Whether the trees are queued."""
        return self._trees is not None

    @property
    def is_half_done(self) -> bool:
        """Whether at least half of the forwards are queued."""
        return 2 * self._num_queued >= self._pass.shape.tree.num_steps

    def advance(self) -> bool:
        """Queues a part and waits until the device begins it, so that the caller can queue another
        part, or other work, in time; returns whether a part was left."""
        before, self._part = self._part, None
        is_left = self._queue_part()
        if is_left and self._pass.is_on_gpu:
            self._part = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._part.record()
        if before is not None:
            before.synchronize()
        return is_left

    def queue(self) -> None:
        """Queues all remaining parts; waits for nothing."""
        while self._queue_part():
            pass

    def run_on(self) -> bool:
        """Queues all remaining parts on a GPU, where that is cheap; returns whether any remain."""
        if self._pass.is_on_gpu:
            self.queue()
        return not self._is_queued

    def give_up(self) -> None:
        """Drops the remaining parts, because another pass replaces this one."""
        self._is_queued = True

    def read(self) -> list[PassTree]:
        """Waits for the trees and returns the results of each sequence."""
        while self._trees is None and self._queue_part():
            pass
        assert self._trees is not None, "the pass was given up"
        rows = self._trees.read().contiguous()
        scores = rows.view(torch.float32).tolist()
        return [
            self._tree(place, *row)
            for place, row in enumerate(zip(rows.tolist(), scores, strict=True))
        ]

    def choices(self, place: int, row: int) -> tuple[tuple[int, float], ...]:
        """See `PassRows.after`."""
        self.queue()
        if self._choices is None:
            return ()
        if self._host_choices is None:
            numbers = self._choices.read().contiguous()
            self._host_choices = numbers.tolist(), numbers.view(torch.float32).tolist()
        (numbers_of, scores_of), width = self._host_choices, self._pass.kind.num_choices
        first, half = row * width, len(numbers_of[place]) // 2
        tokens = numbers_of[place][first : first + width]
        return tuple(zip(tokens, scores_of[place][half + first :][:width], strict=True))

    @torch.inference_mode()
    def states(self, rows: Sequence[tuple[int, int]]) -> Tensor:
        """Returns the states `[R, H]` of rows, given as place of the sequence and row in it."""
        self.queue()
        assert self._states is not None, "the pass keeps no states, or was given up"
        num_rows = self._states.shape[1]
        index = [place * num_rows + row for place, row in rows]
        states = self._states.flatten(0, 1)
        return states.index_select(0, uploaded_numbers(index, states.device))

    @torch.inference_mode()
    def _queue_part(self) -> bool:
        if self._is_queued:
            return False
        part = next(self._parts)
        self._num_queued += 1
        self._is_queued = self._pass.ends_with(part)
        match part:
            case PackedTrees():
                self._trees = HostCopy(part.numbers[: self._num_sequences])
            case PackedRows():
                self._choices = HostCopy(part.numbers[: self._num_sequences])
                if part.states is not None:
                    # The next pass overwrites the states.
                    self._states = part.states[: self._num_sequences].clone()
        return True

    def _tree(self, place: int, row: list[int], scores: list[float]) -> PassTree:
        """Unpacks one row of `PackedTrees`. `scores` are the bits of `row` as floats."""
        num_rows, topk = self._pass.shape.num_tree_rows, self._pass.shape.tree.topk
        num_beam_rows = self._pass.num_levels * topk
        tokens, parents = row[:num_rows], row[num_rows : 2 * num_rows]
        paths, beams = scores[2 * num_rows : 3 * num_rows], row[3 * num_rows :]
        levels = tuple(
            (beams[first : first + topk], beams[num_beam_rows + first :][:topk])
            for first in range(0, num_beam_rows, topk)
        )
        tree = best_tree(tokens, parents, paths, self._max_nodes)
        return PassTree(tree, levels, PassRows(self, place))
