"""The head's side of rounds with a target in another process; see `mapped_rounds`.

Commands come in order, before the target queues the rounds that they announce. The worker queues
them on the device, which waits for the target by itself. So it may be late by up to one round.
"""

from __future__ import annotations

import enum
import logging
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import Tensor

from shared.kv.batch import ForwardBatch
from shared.models.heads.feature_spec import FeatureSpec
from shared.runtime.graphs import capturing
from shared.runtime.mapped_rounds import (
    DONE,
    FAILED,
    GO,
    MappedLayout,
    MappedRound,
    OpenMapped,
    PrepareMapped,
    wait_for_round,
)
from shared.runtime.memory import Shortage
from shared.runtime.outcome_chains import MAX_LANES_AHEAD, OutcomeChains
from shared.runtime.ring_memory import OpenedMemory, RingUnavailable, open_memory
from shared.runtime.round_batches import RoundBatches, SizedShape, state_of_shape
from shared.runtime.round_graphs import num_computed
from shared.runtime.round_head import CatchUp, HeadBacklog
from shared.runtime.round_state import RoundSampling, RoundState
from shared.runtime.stream_times import OnSpan, StreamTimes
from shared.runtime.tree_draft import DraftCode, grown
from shared.runtime.tree_model import RoundModel

logger = logging.getLogger(__name__)
LONGEST_WAIT_US = 10_000_000
"""If an announced round does not begin within that time, the target has ended."""
_WORDS_A_PROGRAM = 1024
_WORD_BYTES = 8


class MappedFeatures:
    """Features of the target's tokens, read in the target's memory.

    Args:
        width: W, elements of a row.
        device: the head's device.
    """

    def __init__(
        self, memory: OpenedMemory, start_bytes: int, width: int, dtype: torch.dtype,
        device: torch.device,
    ) -> None:  # fmt: skip
        self._memory, self._start_bytes = memory, start_bytes
        self._width, self._dtype, self._device = width, dtype, device

    @classmethod
    def of(cls, command: OpenMapped, spec: FeatureSpec, device: torch.device) -> MappedFeatures:
        """Raises:
        RingUnavailable: the memory of the features cannot be mapped.
        """
        features = command.features
        if features is None:
            raise RingUnavailable("the target does not say where the features are")
        size_bytes = features.num_rows * spec.width * spec.dtype.itemsize
        memory = open_memory(features.address, size_bytes, device)
        return cls(memory, features.start_bytes, spec.width, spec.dtype, device)

    def gather(self, slots: Tensor) -> Tensor:
        """Returns the rows `[N, W]` at slots `[N]` int64 of the target's pool."""
        rows = torch.empty((len(slots), self._width), dtype=self._dtype, device=self._device)
        self.gather_into(slots, rows)
        return rows

    def gather_into(self, slots: Tensor, rows: Tensor) -> None:
        """Fills contiguous `rows` `[N, W]`; on a GPU it queues the copy."""
        row_bytes = self._width * self._dtype.itemsize
        if self._device.type != "cuda":
            for row, slot in zip(rows, slots.tolist(), strict=True):
                self._memory.copy(self._start_bytes + slot * row_bytes, row)
            return
        import triton

        from shared.runtime.exchange_jit import gather_words

        assert row_bytes % _WORD_BYTES == 0, "a row is whole words"
        num_words = row_bytes // _WORD_BYTES
        grid = (len(slots), triton.cdiv(num_words, _WORDS_A_PROGRAM))
        gather_words[grid](
            self._memory.pointer + self._start_bytes, slots, rows.view(torch.int64),
            NUM_WORDS=num_words, BLOCK=_WORDS_A_PROGRAM,
        )  # fmt: skip


class _Part(enum.Enum):
    """A part of a round: grow its trees, or select them among the prepared chains; and prepare
    chains for the next round."""

    GROW = enum.auto()
    SELECT = enum.auto()
    PREPARE = enum.auto()


_SPANS = {_Part.GROW: "propose", _Part.SELECT: "select", _Part.PREPARE: "ahead"}
_GraphKey: TypeAlias = tuple[int, RoundSampling, _Part]
"""Computed lanes, kind of noise, and part."""


@dataclass(slots=True, eq=False)
class _Rounds:
    """Rounds of one shape.

    Attributes:
        state: the lanes that may take part.
        features: `[S * W, any]`, features of the open rows; None if they read none.
        chains: chains prepared for verdicts; None for shapes without.
    """

    shape: SizedShape
    state: RoundState
    code: DraftCode
    features: Tensor | None
    chains: OutcomeChains | None
    graphs: dict[_GraphKey, torch.cuda.CUDAGraph] = field(default_factory=dict)

    def parts(self, num_slots: int) -> tuple[_Part, ...]:
        """Returns the parts that rounds of `num_slots` lanes may have."""
        is_ahead = self.chains is not None and num_slots <= MAX_LANES_AHEAD
        return tuple(_Part) if is_ahead else (_Part.GROW,)


class MappedHeadWorker:
    """Runs the rounds of one target, on a stream of their own. For one thread.

    Args:
        model: draft model with pages as large as the target's.
        stream: None creates a new stream.
        on_span: receives the start and end times of the parts of rounds.

    Attributes:
        stream: the GPU stream of the rounds; None on a CPU.

    Raises:
        RingUnavailable: the target's memory cannot be mapped.
    """

    def __init__(
        self,
        model: RoundModel,
        command: OpenMapped,
        stream: torch.cuda.Stream | None = None,
        on_span: OnSpan | None = None,
    ) -> None:
        device = model.pool.device
        self._device, self._is_cuda = device, device.type == "cuda"
        self._times = None if on_span is None else StreamTimes(device, on_span)
        self.stream = stream
        if self._is_cuda and stream is None:
            self.stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self.wait_for_caller()
        with self._on_stream():
            self._open(model, command)

    def _open(self, model: RoundModel, command: OpenMapped) -> None:
        pool, spec, device = model.pool, model.feature_spec, self._device
        self._layout = MappedLayout.of(command.shapes, pool.page_size)
        self._memory = open_memory(command.address, self._layout.size_bytes, device)
        self._features = None if spec is None else MappedFeatures.of(command, spec, device)
        gather = None if self._features is None else self._features.gather
        self._catch_up = CatchUp(model, gather)
        self._round = command.last_round
        self._gone = torch.zeros(1, dtype=torch.int32, pin_memory=self._is_cuda)
        self._current = torch.zeros(1, dtype=torch.int32, device=device)
        self._graph_memory: Any = torch.cuda.graph_pool_handle() if self._is_cuda else None
        # A copy of the target's state.
        self._state = self._layout.sizes.empty_state(device)
        self._rounds = [self._new_rounds(model, sized) for sized in command.shapes]
        # The rounds whose last round has prepared chains for the next one.
        self._prepared: _Rounds | None = None

    def _new_rounds(self, model: RoundModel, sized: SizedShape) -> _Rounds:
        pool, spec, shape = model.pool, model.feature_spec, sized.shape
        features = chains = None
        if spec is not None:
            num_rows = sized.max_sequences * shape.max_committed
            features = torch.zeros((num_rows, spec.width), dtype=spec.dtype, device=self._device)
        code = model.code(RoundBatches(shape, pool.page_size), features)
        if shape.num_outcomes and spec is None:
            chains = OutcomeChains(shape, sized.max_sequences, self._device)
        return _Rounds(sized, state_of_shape(self._state, sized), code, features, chains)

    def wait_for_caller(self) -> None:
        """Makes rounds queued from now on wait for the work on the current stream."""
        if self.stream is not None:
            self.stream.wait_stream(torch.cuda.current_stream(self._device))

    def hold_caller(self) -> None:
        """Makes later work on the current stream wait for the rounds queued so far."""
        if self.stream is not None:
            torch.cuda.current_stream(self._device).wait_stream(self.stream)

    def abandon(self) -> None:
        """Ends all waits for the target, because it has gone."""
        self._gone[0] = 1

    def _on_stream(self) -> AbstractContextManager[object]:
        return nullcontext() if self.stream is None else torch.cuda.stream(self.stream)

    @torch.inference_mode()
    def prepare(self, command: PrepareMapped) -> None:
        """Captures the graphs for a number of lanes."""
        if self._is_cuda:
            rounds, num_slots = self._rounds[command.number], command.num_slots
            with self._on_stream():
                for part in rounds.parts(num_slots):
                    self._graph(rounds, num_slots, command.sampling, part)

    def warm_up(self) -> None:
        """Captures the graphs that compute missing rows. Requires that all rounds are prepared,
        whose memory the graphs share."""
        if self.stream is not None:
            with self._on_stream():
                self._catch_up.capture(self._state, self._graph_memory, self.stream)
            self.stream.synchronize()

    @torch.inference_mode()
    def take(self, command: MappedRound) -> None:
        """Queues a round: waits for the target, computes the backlogs, grows the trees. If memory
        runs out, the round has no trees, and the target asks again a little later."""
        with self._on_stream():
            try:
                self._take(command)
            except RuntimeError as error:
                logger.warning("no trees for a round of a target: %s", Shortage.of(error))
                self._prepared = None
                self._await_go()
                self._memory.write(FAILED, self._current)
                self._raise_done()

    def _take(self, command: MappedRound) -> None:
        self._round += 1
        rounds, num_slots = self._rounds[command.number], command.num_slots
        is_ahead = command.is_ahead and _Part.PREPARE in rounds.parts(num_slots)
        # If all sequences are new, no prepared chain is for them.
        is_new = len(command.backlogs) >= num_slots
        was_prepared = is_ahead and self._prepared is rounds and not is_new
        # Without features the backlogs depend on nothing that the target has yet to compute. New
        # sequences have no prepared chains, and those of the others need no backlog.
        awaits_first = was_prepared or self._features is not None
        if awaits_first:
            self._await_go()
        if was_prepared:
            self._run(rounds, num_slots, command.sampling, _Part.SELECT)
        self._compute_backlogs(command.backlogs)
        if not awaits_first:
            self._await_go()
        if command.open_shape is not None:
            self._read_open_rows(self._rounds[command.open_shape], command.num_slots)
        if not was_prepared:
            self._run(rounds, num_slots, command.sampling, _Part.GROW)
        if is_ahead:
            self._run(rounds, num_slots, command.sampling, _Part.PREPARE)
        self._prepared = rounds if is_ahead else None

    def _compute_backlogs(self, backlogs: Sequence[HeadBacklog]) -> None:
        if backlogs:
            with self._timed("read"):
                self._catch_up.run(backlogs)

    def _run(self, rounds: _Rounds, num_slots: int, sampling: RoundSampling, part: _Part) -> None:
        with self._timed(_SPANS[part]):
            if self._is_cuda:
                self._graph(rounds, num_slots, sampling, part).replay()
            else:
                self._queue(rounds, self._num_computed(rounds, num_slots), sampling, part)

    def _timed(self, name: str) -> AbstractContextManager[object]:
        return nullcontext() if self._times is None else self._times.span(name)

    def _num_computed(self, rounds: _Rounds, num_slots: int) -> int:
        return num_computed(num_slots, rounds.shape.max_sequences)

    def _graph(
        self, rounds: _Rounds, num_slots: int, sampling: RoundSampling, part: _Part
    ) -> torch.cuda.CUDAGraph:
        kind = rounds.code.kind_of(sampling)
        if part is _Part.SELECT:
            kind = RoundSampling.GREEDY  # selection draws nothing
        key = (self._num_computed(rounds, num_slots), kind, part)
        graph = rounds.graphs.get(key)
        if graph is None:
            # A run over empty slots loads kernels outside of the graph.
            empty, chains = rounds.state.first(key[0]).emptied(), rounds.chains
            if part is _Part.GROW:
                empty.limit_open(rounds.shape.shape.max_committed)
                self._draw(rounds, empty, kind)
            elif chains is not None and part is _Part.PREPARE:
                chains.prepare(rounds.code, empty, kind)
            elif chains is not None:
                chains.select(empty)
            graph = torch.cuda.CUDAGraph()
            with capturing(graph, self._graph_memory, self.stream):
                self._queue(rounds, *key)
            rounds.graphs[key] = graph
        return graph

    def _queue(self, rounds: _Rounds, num_slots: int, sampling: RoundSampling, part: _Part) -> None:
        """Queues a part of a round of the first slots; a graph may capture it."""
        state, chains = rounds.state.first(num_slots), rounds.chains
        if part is _Part.PREPARE:
            assert chains is not None
            chains.prepare(rounds.code, state, sampling)
            return
        self._copy_state(num_slots)
        most = rounds.shape.shape.max_committed
        if most < self._layout.sizes.max_open_rows:
            self._state.first(num_slots).limit_open(most)
        if part is _Part.GROW:
            trees = self._draw(rounds, state, sampling)
            if chains is not None:
                chains.begin(trees[:, 0])
        else:
            assert chains is not None
            trees = chains.select(state)
        self._memory.write(self._layout.trees, trees)
        self._raise_done()

    def _draw(self, rounds: _Rounds, state: RoundState, sampling: RoundSampling) -> Tensor:
        """Grows trees; returns their tokens and parents `[S, 2, T]` int64."""
        seen = rounds.code.seen(state)
        rows = grown(rounds.code, seen, sampling, *self._open_rows(rounds, seen)).rows
        return torch.stack((rows.token_ids, rows.parents), dim=1)

    def _open_rows(self, rounds: _Rounds, seen: RoundState) -> tuple[ForwardBatch, Tensor]:
        """Returns the open rows, after their features were gathered."""
        batch, sources = rounds.code.open_rows(seen)
        if self._features is not None and rounds.features is not None:
            self._features.gather_into(sources, rounds.features[: len(sources)])
            sources = torch.arange(len(sources), device=self._device)
        return batch, sources

    def _read_open_rows(self, rounds: _Rounds, num_slots: int) -> None:
        """Computes the open rows of the first slots as the last round left them, of this shape."""
        num_slots = self._num_computed(rounds, num_slots)
        self._copy_state(num_slots)
        seen = rounds.code.seen(rounds.state.first(num_slots))
        batch, sources = self._open_rows(rounds, seen)
        rounds.code.forwards(seen, batch, sources, keeps_states=False).read_open()

    def _copy_state(self, num_slots: int) -> None:
        """Copies the target's state of the first slots."""
        state, place, memory = self._state.first(num_slots), self._layout, self._memory
        memory.copy(place.numbers, state.numbers)
        memory.copy(place.sampling, state.sampling)
        memory.copy(place.page_table, state.page_table)
        memory.copy(place.head_page_table, state.head_page_table)

    def _await_go(self) -> None:
        if self._is_cuda:
            from shared.runtime.exchange_jit import await_go

            places = self._memory.pointer + GO, self._gone.data_ptr(), self._current
            await_go[(1,)](*places, self._round, LONGEST_WAIT_US, num_warps=1)
            return
        self._current[0] = self._round
        go = torch.zeros(1, dtype=torch.int32)

        def counter() -> int:
            self._memory.copy(GO, go)
            return int(go[0])

        wait_for_round(self._round, counter, LONGEST_WAIT_US / 1e6, self._gone)

    def _raise_done(self) -> None:
        if self._is_cuda:
            from shared.runtime.exchange_jit import raise_done

            raise_done[(1,)](self._memory.pointer + DONE, self._current, num_warps=1)
        else:
            self._memory.write(DONE, self._current)
