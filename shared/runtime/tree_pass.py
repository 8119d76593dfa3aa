"""One pass of a model that grows whole trees of one shape for a batch of sequences.

A pass is a CUDA graph for each number of slots and each kind of sampling, or the same code as it
is: without CUDA, where graphs are not wanted, and where memory does not hold another one.
"""

from __future__ import annotations

import logging
from collections.abc import Generator, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias, TypeVar

import torch
from torch import Tensor

from shared.runtime.capture import capturing
from shared.runtime.joined_rows import joined_rows
from shared.runtime.open_sequence import OpenInputs, OpenSequence, open_inputs
from shared.runtime.pass_codec import packed_choices, packed_trees
from shared.runtime.round_batches import RoundBatches, RoundShape
from shared.runtime.round_sampling import RoundSampling
from shared.runtime.tree_model import TreeDraft, TreeModel

logger = logging.getLogger(__name__)
T = TypeVar("T")
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


Levels: TypeAlias = Generator[Tensor | None, None, Tensor | None]
"""A pass under way: each step queues a part of it on the device. One of them returns the trees, see
`packed_trees`, and the end what may follow their nodes, see `packed_choices`, or None; both hold
until the next pass."""


@dataclass(frozen=True, slots=True)
class _CapturedPass:
    """Graphs that follow one another, each with what it has made: nothing, the last one the trees;
    then that of the choices, where there are any."""

    parts: Sequence[tuple[torch.cuda.CUDAGraph, Tensor | None]]
    last: tuple[torch.cuda.CUDAGraph, Tensor] | None

    @property
    def graphs(self) -> list[torch.cuda.CUDAGraph]:
        """All of them."""
        parts = [graph for graph, _ in self.parts]
        return parts if self.last is None else [*parts, self.last[0]]

    def levels(self) -> Levels:
        for graph, trees in self.parts:
            graph.replay()
            yield trees
        if self.last is None:
            return None
        graph, choices = self.last
        graph.replay()
        return choices


def slot_buckets(max_sequences: int) -> tuple[int, ...]:
    """Returns the numbers of slots that there are graphs for, ascending, `max_sequences` last."""
    return (*(size for size in _SLOT_BUCKETS if size < max_sequences), max_sequences)


class TreePass:
    """Passes of one shape.

    Args:
        num_choices: see `DecoderDraft`.
        is_split: each part is a graph, and sequences have one open row each; else all up to the
            trees is one graph.
        memory: of `torch.cuda.graph_pool_handle`, for all graphs of a model; None without graphs.
    """

    def __init__(
        self,
        model: TreeModel,
        shape: RoundShape,
        limits: PassLimits,
        *,
        num_choices: int,
        is_split: bool,
        memory: Any,
    ) -> None:
        self._model, self._pool = model, model.pool
        self.shape, self.num_choices = shape, num_choices
        self._limits, self._is_split, self._memory = limits, is_split, memory
        self.max_open_rows = 1 if is_split else shape.max_committed
        # Graphs read the features and the inputs at addresses that never change.
        self._features = torch.zeros(
            (limits.max_sequences * self.max_open_rows, model.feature_width),
            dtype=model.dtype,
            device=self._pool.device,
        )
        self._inputs = OpenInputs.empty(
            limits.max_sequences if limits.has_graphs else 0,
            max_open_rows=self.max_open_rows,
            num_pages=self._num_pages(shape.max_kv_length),
            device=self._pool.device,
        )
        # Graphs read what its batches hold, too.
        self._captured_draft = self._draft(shape)
        self._captured: dict[tuple[int, RoundSampling], _CapturedPass | None] = {}
        self._buckets = slot_buckets(limits.max_sequences)

    @torch.inference_mode()
    def begin(self, sequences: Sequence[OpenSequence], features: Sequence[Tensor]) -> Levels:
        """Begins a pass and gives up the one before, unless it has ended.

        Args:
            sequences: at most `max_sequences`, with `max_open_rows` open rows at most.
            features: of the open rows, end to end, in any pieces `[any, width]` on any devices;
                none for a model that reads none.
        """
        self._take_features(features)
        sampling = RoundSampling.of(each.sampling for each in sequences)
        bucket = next(size for size in self._buckets if size >= len(sequences))
        captured = self._graph_of(bucket, sampling) if self._limits.has_graphs else None
        longest = max(each.length for each in sequences)
        assert longest <= self._limits.max_context_tokens, f"{longest} tokens"
        reach = longest + self._spare
        widest = max(each.num_open for each in sequences)
        inputs = open_inputs(
            sequences,
            num_slots=len(sequences) if captured is None else bucket,
            max_open_rows=widest if captured is None else self.max_open_rows,
            num_pages=self._num_pages(reach),
            device=self._pool.device,
        )
        if captured is None:
            shape = replace(self.shape, max_kv_length=reach)
            return self._grown(self._draft(shape), inputs, sampling)
        self._inputs.first(bucket).fill(inputs)
        return captured.levels()

    @torch.inference_mode()
    def capture_next(self, kinds: Iterable[RoundSampling]) -> bool:
        """Captures a graph that some kinds of sampling may want: those of the most slots first,
        whose memory the others reuse, then the smallest. Returns whether one was left."""
        kinds = dict.fromkeys(map(self._captured_draft.kind_of, kinds))
        for num_slots in (self._buckets[-1], *self._buckets):
            for kind in kinds:
                if (num_slots, kind) not in self._captured:
                    self._graph_of(num_slots, kind)
                    return True
        return False

    def release(self) -> None:
        """Takes back from the group what keeps its graphs alive: this pass is wanted no more."""
        if self._model.group is None:
            return
        for captured in filter(None, self._captured.values()):
            for graph in captured.graphs:
                self._model.group.graphs.remove(graph)

    @property
    def is_on_gpu(self) -> bool:
        return self._pool.device.type == "cuda"

    @property
    def num_levels(self) -> int:
        """Levels of nodes that are computed: the leaves are, where it matters what may follow."""
        steps = self.shape.tree.num_steps
        return steps if self.num_choices else steps - 1

    @property
    def _spare(self) -> int:
        """Indices behind a sequence that a pass may address."""
        num_beam_rows = self.num_levels * self.shape.tree.topk
        return max(self.shape.num_tree_rows, num_beam_rows, self.max_open_rows)

    def _num_pages(self, num_tokens: int) -> int:
        return -(-num_tokens // self._pool.page_size)

    def _take_features(self, pieces: Sequence[Tensor]) -> None:
        if not pieces:
            return
        rows = joined_rows(pieces, self._features.device)
        assert len(rows) <= len(self._features), f"{len(rows)} open rows"
        self._features[: len(rows)].copy_(rows)

    def _draft(self, shape: RoundShape) -> TreeDraft:
        batches = RoundBatches(shape, self._pool.page_size)
        return self._model.draft(batches, self._features, self.num_choices)

    def _grown(self, draft: TreeDraft, inputs: OpenInputs, sampling: RoundSampling) -> Levels:
        kind, slots = draft.kind_of(sampling), inputs.feature_slots.flatten()
        levels = draft.grow_levels(inputs.state, kind, slots)
        trees = None
        while trees is None:
            trees = next(levels)
            yield None if trees is None else packed_trees(trees)
        choices = ended(levels)
        return None if choices is None else packed_choices(choices)

    def _graph_of(self, num_slots: int, sampling: RoundSampling) -> _CapturedPass | None:
        """Returns the graph, captured when first asked for; None if it cannot be."""
        key = num_slots, self._captured_draft.kind_of(sampling)
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

    def _capture(self, num_slots: int, sampling: RoundSampling) -> _CapturedPass:
        draft, inputs = self._captured_draft, self._inputs.first(num_slots)
        # Loads kernels and makes the workspaces of products outside of the graph, for nobody.
        nobody = OpenInputs(inputs.state.emptied(), torch.zeros_like(inputs.feature_slots))
        ended(self._grown(draft, nobody, sampling))
        levels, trees = self._grown(draft, inputs, sampling), None
        parts: list[tuple[torch.cuda.CUDAGraph, Tensor | None]] = []
        while trees is None:
            graph = self._new_graph()
            with capturing(graph, self._memory):
                trees = next(levels) if self._is_split else next(filter(_is_there, levels))
            parts.append((graph, trees))
        if not self.num_choices:
            return _CapturedPass(parts, None)
        graph = self._new_graph()
        with capturing(graph, self._memory):
            choices = ended(levels)
        assert choices is not None
        return _CapturedPass(parts, (graph, choices))

    def _new_graph(self) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        if self._model.group is not None:
            self._model.group.graphs.append(graph)
        return graph


def ended(levels: Generator[object, None, T]) -> T:
    """Queues all that is left; returns what comes at the end."""
    while True:
        try:
            next(levels)
        except StopIteration as end:
            value: T = end.value
            return value


def _is_there(trees: Tensor | None) -> bool:
    return trees is not None
