"""Shared memory through which a target and a draft head in another process run rounds together.

The target owns the memory, and the head's process maps it. The target writes the state of the lanes
and the features; the head writes trees. Two counters synchronize them: the target raises `GO` once
it has written all inputs of a round, and the head raises `DONE` behind its trees. Each side waits
for the other's counter on its device's stream, so no host is involved between two rounds. A head
that runs out of memory in a round stores the round's number in `FAILED`, and raises `DONE` all the
same. A side that has gone is not waited for.

Nothing that the head writes can change a token: the target reads each tree once, into memory of its
own, and mends invalid trees.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate

import torch
from torch import Tensor

from shared.kv.pool import KvPool
from shared.models.heads.feature_spec import FeatureSpec
from shared.runtime.host_copy import HostCopy
from shared.runtime.ring_memory import RingAddress, RingMemory, share_memory
from shared.runtime.round_batches import (
    RoundBatches,
    RoundShape,
    RoundTree,
    SizedShape,
    StateSizes,
)
from shared.runtime.round_graphs import TreeSource
from shared.runtime.round_head import HeadBacklog, HeadPlace, RoundHead, RoundSeconds, read_trees
from shared.runtime.round_state import TAIL, RoundSampling, RoundState
from shared.tokens import TreeShape

_ALIGNMENT = 256
GO, DONE, FAILED = 0, _ALIGNMENT, _ALIGNMENT + 4
"""Byte offsets of the two counters, and of the number of the last round that failed; int32 each."""
_LATE, _GONE = 0, 1
_NUM_SAMPLING_COLUMNS = 4
_SHORTEST_NAP_S = 2e-5
_NAP_SHARE = 1 / 16


def wait_for_round(number: int, read: Callable[[], int], longest_s: float, gone: Tensor) -> bool:
    """Waits on the host until a counter reaches a round's number; returns whether it did in time.

    Pauses between two reads of the counter grow with the wait, because the peer may need this core.

    Args:
        read: returns the counter.
        gone: `[1]`, not 0 once the peer has gone.
    """
    began_s = time.monotonic()
    while read() < number:
        waited_s = time.monotonic() - began_s
        if waited_s >= longest_s or gone[0]:
            return False
        time.sleep(max(_SHORTEST_NAP_S, waited_s * _NAP_SHARE))
    return True


@dataclass(frozen=True, slots=True)
class MappedLayout:
    """Byte offsets in the memory, which both sides derive from the shapes.

    Attributes:
        sizes: sizes of the lanes' state; the next attributes are its parts, see `RoundState`.
        trees: tokens and parents `[S, 2, T]` int64 of the round under way, of any shape.
    """

    sizes: StateSizes
    numbers: int
    sampling: int
    page_table: int
    head_page_table: int
    trees: int
    size_bytes: int

    @classmethod
    def of(cls, shapes: Sequence[SizedShape], page_size: int) -> MappedLayout:
        """Returns the layout for rounds of some shapes."""
        sizes = StateSizes.of(shapes, page_size)
        rows, pages = sizes.num_slots, sizes.num_pages
        part_bytes = (
            8 * rows * (TAIL + sizes.max_open_rows),
            8 * rows * _NUM_SAMPLING_COLUMNS,
            4 * rows * pages,
            4 * rows * pages,
            max(16 * sized.max_sequences * sized.shape.num_tree_rows for sized in shapes),
        )
        aligned = (-(-size_bytes // _ALIGNMENT) * _ALIGNMENT for size_bytes in part_bytes)
        ends = accumulate(aligned, initial=2 * _ALIGNMENT)
        return cls(sizes, *ends)

    def state_within(self, memory: Tensor) -> RoundState:
        """Returns the state of the lanes as views of the memory `[size]` uint8."""
        rows, pages = self.sizes.num_slots, self.sizes.num_pages

        def part(start: int, dtype: torch.dtype, width: int) -> Tensor:
            size_bytes = rows * width * dtype.itemsize
            return memory[start : start + size_bytes].view(dtype).view(rows, width)

        return RoundState(
            part(self.numbers, torch.int64, TAIL + self.sizes.max_open_rows),
            part(self.sampling, torch.float64, _NUM_SAMPLING_COLUMNS),
            part(self.page_table, torch.int32, pages),
            part(self.head_page_table, torch.int32, pages),
        )


@dataclass(frozen=True, slots=True)
class FeatureAddress:
    """The address of the target's features for the head's process.

    Attributes:
        address: address of the allocation that holds them.
        start_bytes: offset of the first row.
        num_rows: number of rows, one for each slot of the target's pool.
    """

    address: RingAddress
    start_bytes: int
    num_rows: int


@dataclass(frozen=True, slots=True)
class OpenMapped:
    """Asks the head's process to map the memory. Rounds follow.

    Attributes:
        features: None for a model that reads none.
        last_round: number of the last round before, in this memory.
    """

    address: RingAddress
    features: FeatureAddress | None
    shapes: tuple[SizedShape, ...]
    last_round: int


@dataclass(frozen=True, slots=True)
class PrepareMapped:
    """Asks the head to capture the graphs for rounds of one size; it reports after the last.

    Attributes:
        number: number of the shape.
        is_last: whether this is the last preparation.
    """

    number: int
    num_slots: int
    sampling: RoundSampling
    is_last: bool = False


@dataclass(frozen=True, slots=True)
class MappedRound:
    """Announces a round before the target queues it.

    Attributes:
        number: number of the shape.
        backlogs: rows that the head computes first.
        open_shape: number of the shape whose open rows the head computes then, because this
            shape has room for fewer; None for none.
        is_ahead: whether the head prepares chains for the next round. The trees then are the chains
            that the round before has prepared, if any.
    """

    number: int
    num_slots: int
    sampling: RoundSampling
    backlogs: tuple[HeadBacklog, ...] = ()
    is_ahead: bool = False
    open_shape: int | None = None


MappedCommand = OpenMapped | PrepareMapped | MappedRound


# The target's side.

LONGEST_WAIT_US = {"cuda": 40_000, "cpu": 1_000_000}
"""Longest wait for trees beyond the time of a whole round: a busy host announces rounds late."""
UNKNOWN_ROUND_S = 0.03
"""Assumed time of a round that was not measured."""
WAIT_A_BACKLOG_US, WAIT_A_ROW_US = 50_000, 20
"""Extra wait if the head computes prompt rows first, and for each of these rows."""
WARM_UP_WAIT_US = 2_000_000
_LONGEST_US = 2**31 - 1


Send = Callable[[Sequence[MappedCommand]], bool]
"""Sends commands to the head's process; returns False if it does not keep up."""


@dataclass(frozen=True, slots=True)
class MappedSource:
    """A kind of head in another process.

    Attributes:
        vocab_size: number of tokens that it can propose.
        shapes: shapes of all rounds, in the order of their numbers.
    """

    vocab_size: int
    shapes: tuple[SizedShape, ...]


class MappedHead(HeadPlace):
    """A head of another process. Owned by the engine thread.

    Args:
        spec: the hidden states that the head reads.
        features: address of these features; None for a model that reads none.
        target_vocab_size: the target's vocabulary size; trees may hold only tokens below it.
    """

    announce_s = 3e-3
    """Within that time a message by gRPC mostly reaches the head's process, which queues its part.
    """

    def __init__(
        self,
        source: MappedSource,
        spec: FeatureSpec | None,
        features: FeatureAddress | None,
        *,
        device: torch.device,
        page_size: int,
        target_vocab_size: int,
    ) -> None:
        """Raises:
        RingUnavailable: the memory cannot be shared.
        """
        self.source, self.code = source, None
        self._send: Send = _refuse
        self.spec, self._shapes, self.page_size = spec, source.shapes, page_size
        self.target_vocab_size = target_vocab_size
        self._layout = MappedLayout.of(source.shapes, page_size)
        self._memory: RingMemory = share_memory(self._layout.size_bytes, device)
        self._memory.elements.zero_()
        self._features = features
        self._round = 0
        self._late_before = 0
        self._longest_us = LONGEST_WAIT_US[device.type]
        self._backlogs: list[HeadBacklog] = []
        # Copy of the head's counter, on its way to the host.
        self._done_copy: HostCopy | None = None
        self.is_open = self.is_broken = False
        self._is_warming_up = True
        self._round_s: RoundSeconds | None = None
        self._is_cuda = is_cuda = device.type == "cuda"
        # Another thread may report that a process has gone while `open` names the next one.
        self._lock, self._num_openings = threading.Lock(), 0
        # The last round whose trees came too late, and whether the process has gone.
        self._notes = torch.zeros(2, dtype=torch.int32, pin_memory=is_cuda)

    def shape(self, tree: TreeShape, max_context_tokens: int) -> RoundShape:
        return RoundShape.of(
            tree,
            draft_vocab_size=self.source.vocab_size,
            max_context_tokens=max_context_tokens,
            num_outcomes=max(sized.shape.num_outcomes for sized in self._shapes),
        )

    def open(self, send: Send, prepared: Sequence[PrepareMapped]) -> Callable[[], None]:
        """Asks a process to map the memory and to prepare for rounds.

        Returns:
            What ends the waits of all rounds under way, and of later ones, once that process has
            gone. Callable from any thread: the engine's may be in one of these waits. Has no effect
            after the next `open`.
        """
        self._send, self.is_open, self.is_broken = send, True, False
        self._is_warming_up, self._backlogs = True, []
        with self._lock:
            self._num_openings += 1
            self._notes[_GONE] = 0
        self.forgive()
        opening = OpenMapped(self._memory.address, self._features, self._shapes, self._round)
        self._send_all(opening, *prepared)
        return partial(self._abandon, self._num_openings)

    def close(self) -> None:
        """Ends the use of a process that has left; `open` may name another one."""
        self._send, self.is_open, self.is_broken = _refuse, False, True

    def _abandon(self, opening: int) -> None:
        with self._lock:
            if opening == self._num_openings:
                self._notes[_GONE] = 1

    def warmed_up(self, round_s: RoundSeconds | None) -> None:
        """See `HeadPlace.warmed_up`. From now on late trees count."""
        self._is_warming_up, self._round_s = False, round_s
        self.forgive()

    @property
    def is_late(self) -> bool:
        """Whether trees came too late since `forgive`, or the process has gone or does not keep
        up."""
        late, gone = self._notes.tolist()
        return self.is_broken or bool(gone) or late != self._late_before

    @property
    def has_caught_up(self) -> bool:
        """Whether the process has finished every announced round. On a GPU the answer is slightly
        out of date, because it waits for nothing. A frozen process never catches up."""
        if self._done_copy is None:
            counters = self._memory.elements[: DONE + 4].view(torch.int32)
            self._done_copy = HostCopy(counters[DONE // 4 :])
        if not self._done_copy.is_done:
            return False
        seen, self._done_copy = int(self._done_copy.read()[0]), None
        return seen >= self._round

    def forgive(self) -> None:
        """See `HeadPlace.forgive`."""
        self._late_before = int(self._notes[_LATE])

    def in_rounds(
        self, shapes: Sequence[SizedShape], feature_rows: Tensor | None, target: KvPool
    ) -> RoundHead:
        assert self._shapes == tuple(shapes), "the shapes differ from those of the memory"
        memory = self._memory.elements
        state = self._layout.state_within(memory)
        state.copy_(self._layout.sizes.empty_state(memory.device))
        return _MappedRounds(self, state, memory[self._layout.trees :].view(torch.int64))

    def catch_up(self, backlogs: Iterable[HeadBacklog]) -> None:
        """Adds rows that the head computes at the start of the next round."""
        self._backlogs += backlogs

    def begin(
        self,
        number: int,
        num_slots: int,
        sampling: RoundSampling,
        *,
        is_ahead: bool,
        open_shape: int | None,
    ) -> None:
        """Announces a round and queues the wait for its trees on the current stream."""
        backlogs, self._backlogs = tuple(self._backlogs), []
        self._round += 1
        command = MappedRound(number, num_slots, sampling, backlogs, is_ahead, open_shape)
        self._send_all(command)
        limit_us = WARM_UP_WAIT_US
        if not self._is_warming_up:
            tree = replace(self._shapes[number].shape.tree, is_ahead=is_ahead)
            round_s = self._round_s and self._round_s(tree, num_slots)
            limit_us = self._longest_us + int(1e6 * (round_s or UNKNOWN_ROUND_S))
        num_rows = sum(backlog.num_rows for backlog in backlogs)
        limit_us += WAIT_A_ROW_US * num_rows + (WAIT_A_BACKLOG_US if num_rows else 0)
        # A process that has gone, or was late, is not waited for.
        self._exchange(0 if self.is_late else min(limit_us, _LONGEST_US))

    def _send_all(self, *commands: MappedCommand) -> None:
        if not self.is_broken and not self._send(commands):
            self.is_broken = True

    def _exchange(self, limit_us: int) -> None:
        memory = self._memory.elements
        if self._is_cuda:
            from shared.runtime.exchange_jit import exchange

            start, notes = memory.data_ptr(), self._notes.data_ptr()
            addresses, numbers = (start + GO, start + DONE, notes), (self._late_before, self._round)
            exchange[(1,)](*addresses, *numbers, limit_us, num_warps=1)
            return
        counters = memory.view(torch.int32)
        counters[GO // 4] = self._round
        gone, limit_s = self._notes[_GONE:], limit_us / 1e6
        is_done = wait_for_round(self._round, lambda: int(counters[DONE // 4]), limit_s, gone)
        if not is_done or int(counters[FAILED // 4]) == self._round:
            self._notes[_LATE] = self._round


def _refuse(_: Sequence[MappedCommand]) -> bool:
    """See `Send`, while no process is connected."""
    return False


class _MappedRounds(RoundHead):
    """Args:
    trees: `[any]` int64, memory that begins with the trees of the round under way.
    """

    def __init__(self, head: MappedHead, state: RoundState, trees: Tensor) -> None:
        self._head, self._trees = head, trees
        self.state, self.feature_spec = state, head.spec
        self._open_shape: int | None = None

    @property
    def is_late(self) -> bool:
        return self._head.is_late

    def catch_up(self, backlogs: Iterable[HeadBacklog]) -> None:
        self._head.catch_up(backlogs)

    def trees(self, number: int, sized: SizedShape) -> TreeSource:
        head = self._head
        size = (sized.max_sequences, 2, sized.shape.num_tree_rows)
        trees = self._trees[: math.prod(size)].view(size)
        return _MappedTrees(
            trees, RoundBatches(sized.shape, head.page_size), head.target_vocab_size
        )

    def read_open_rows(self, number: int, num_slots: int) -> None:
        """See `RoundHead.read_open_rows`; the head does it at the start of the next round."""
        self._open_shape = number

    def begin(
        self, number: int, num_slots: int, sampling: RoundSampling, *, is_ahead: bool
    ) -> None:
        open_shape, self._open_shape = self._open_shape, None
        self._head.begin(number, num_slots, sampling, is_ahead=is_ahead, open_shape=open_shape)
        if open_shape is not None:
            # By now the head has its own copy of the state, or is late.
            self.state.limit_open(1)


@dataclass(frozen=True, slots=True, eq=False)
class _MappedTrees:
    """See `TreeSource`.

    Attributes:
        written: `[S, 2, T]` int64, the trees that the head's process writes.
    """

    written: Tensor
    batches: RoundBatches
    vocab_size: int

    def grow(self, state: RoundState, sampling: RoundSampling) -> RoundTree:
        """Reads the trees once."""
        return read_trees(self.written, state, self.batches, self.vocab_size)
