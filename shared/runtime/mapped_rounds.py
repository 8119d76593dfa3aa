"""Memory through which a target and the process of a draft's head run rounds together.

The target owns all of it, and the head's process maps it. The target writes the state of the lanes
and the features; the head writes trees. Two counters order the two: the target raises `GO` once all
that the head reads of a round is written, and the head raises `DONE` behind its trees. Each side
waits for the other's counter on its device's stream, so no host is between two rounds.

Nothing that the head writes can change a token: the target reads each tree once, into memory of its
own, and mends what is not a tree.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shared.runtime.ring_memory import RingAddress
from shared.runtime.round_batches import RoundShape
from shared.runtime.round_head import HeadBacklog
from shared.runtime.round_sampling import RoundSampling
from shared.runtime.round_state import TAIL, RoundState

_ALIGNMENT = 256
GO, DONE = 0, _ALIGNMENT
"""Where the counters are, int32 each, in bytes."""
_NUM_SAMPLING_COLUMNS = 4
_SHORTEST_NAP_S = 2e-5
_NAP_SHARE = 1 / 16


def wait_for_round(number: int, read: Callable[[], int], longest_s: float) -> bool:
    """Waits on the host until a counter has come to a round; returns whether it has in time.

    The longer it has waited, the longer it sleeps before it reads the counter again: whoever is
    waited for may need this core.

    Args:
        read: returns the counter.
    """
    began_s = time.monotonic()
    while read() < number:
        waited_s = time.monotonic() - began_s
        if waited_s >= longest_s:
            return False
        time.sleep(max(_SHORTEST_NAP_S, waited_s * _NAP_SHARE))
    return True


@dataclass(frozen=True, slots=True)
class MappedShape:
    """Rounds of one shape.

    Attributes:
        max_sequences: lanes.
    """

    shape: RoundShape
    max_sequences: int


@dataclass(frozen=True, slots=True)
class MappedState:
    """Where the state of one shape's lanes begins, in bytes; see `RoundState`."""

    numbers: int
    sampling: int
    page_table: int
    head_page_table: int


@dataclass(frozen=True, slots=True)
class MappedLayout:
    """Where everything begins, in bytes. Both sides work it out from the shapes.

    Attributes:
        trees: tokens and parents `[S, 2, T]` int64 of the round under way, whatever its shape.
    """

    states: tuple[MappedState, ...]
    trees: int
    size_bytes: int

    @classmethod
    def of(cls, shapes: Sequence[MappedShape], page_size: int) -> MappedLayout:
        """Returns the layout for rounds of some shapes."""
        end = 2 * _ALIGNMENT

        def take(size_bytes: int) -> int:
            nonlocal end
            start = end
            end += -(-size_bytes // _ALIGNMENT) * _ALIGNMENT
            return start

        states: list[MappedState] = []
        for each in shapes:
            rows, pages = each.max_sequences, each.shape.num_pages(page_size)
            states.append(
                MappedState(
                    take(8 * rows * (TAIL + each.shape.max_committed)),
                    take(8 * rows * _NUM_SAMPLING_COLUMNS),
                    take(4 * rows * pages),
                    take(4 * rows * pages),
                )
            )
        trees = take(max(16 * each.max_sequences * each.shape.num_tree_rows for each in shapes))
        return cls(tuple(states), trees, end)


def state_within(
    memory: Tensor, layout: MappedState, shape: MappedShape, page_size: int
) -> RoundState:
    """Returns the state of one shape as views of the memory `[size]` uint8."""
    rows, pages = shape.max_sequences, shape.shape.num_pages(page_size)

    def part(start: int, dtype: torch.dtype, width: int) -> Tensor:
        size_bytes = rows * width * dtype.itemsize
        return memory[start : start + size_bytes].view(dtype).view(rows, width)

    return RoundState(
        part(layout.numbers, torch.int64, TAIL + shape.shape.max_committed),
        part(layout.sampling, torch.float64, _NUM_SAMPLING_COLUMNS),
        part(layout.page_table, torch.int32, pages),
        part(layout.head_page_table, torch.int32, pages),
    )


@dataclass(frozen=True, slots=True)
class FeatureAddress:
    """Where the features of the target's tokens are for the head's process.

    Attributes:
        address: of the allocation that holds them.
        start_bytes: where they begin in it.
        num_rows: one for each slot of the target's pool.
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
    shapes: tuple[MappedShape, ...]
    last_round: int


@dataclass(frozen=True, slots=True)
class PrepareMapped:
    """Asks for what rounds of a size need once. The process says when it is ready, see `is_last`.

    Attributes:
        number: of the shape.
        is_last: nothing else is to be prepared.
    """

    number: int
    num_slots: int
    sampling: RoundSampling
    is_last: bool = False


@dataclass(frozen=True, slots=True)
class MappedRound:
    """Announces a round before the target queues it.

    Attributes:
        number: of the shape.
        backlogs: rows that the head computes first.
        is_ahead: the trees are those that were prepared for the verdicts, where the round before
            was one such; and behind them chains are prepared for the next one.
    """

    number: int
    num_slots: int
    sampling: RoundSampling
    backlogs: tuple[HeadBacklog, ...] = ()
    is_ahead: bool = False


MappedCommand = OpenMapped | PrepareMapped | MappedRound
