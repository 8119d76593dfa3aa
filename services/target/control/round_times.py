"""How long rounds on the device take, by shape and size: measured, not assumed. No torch."""

from __future__ import annotations

from dataclasses import dataclass

from services.target.control.averages import Typical
from services.target.control.step_times import StepTimes
from shared.tokens import TreeShape

RUN_SMOOTHING = 0.2
"""Weight of the last run of steps in the usual length of one."""


@dataclass(frozen=True, slots=True)
class RoundSize:
    """What, beside the shape of the trees, decides how long a round takes.

    Attributes:
        num_slots: sequences that are computed, empty places included.
        kind: of sampling; rounds of one kind do the same work.
    """

    num_slots: int
    kind: int


class RoundTimes:
    """Times of rounds that follow one another, and what it costs to begin with them."""

    def __init__(self) -> None:
        self._rounds: dict[tuple[TreeShape, int], StepTimes] = {}
        self._entries: dict[int, Typical] = {}
        self._run_length: float | None = None

    def observe(self, shape: TreeShape, size: RoundSize, duration_s: float) -> None:
        """Takes in the time from one round's result to the next one's."""
        self._rounds.setdefault((shape, size.kind), StepTimes()).observe(size.num_slots, duration_s)

    def observe_entry(self, shape: TreeShape, size: RoundSize, duration_s: float) -> None:
        """Takes in the time from the first launch to the first result: that of a round, and of
        the head's catching up."""
        if not self.is_known(shape, size):
            # Where runs are short, all that is ever seen of a shape may be first rounds.
            self.observe(shape, size, duration_s)
        else:
            spent_s = max(duration_s - self.round_s(shape, size), 0.0)
            self._entries.setdefault(size.num_slots, Typical()).add(spent_s)

    def observe_run(self, num_steps: int) -> None:
        """Takes in how many steps in a row could be rounds, until something else came."""
        last = float(num_steps) if self._run_length is None else self._run_length
        self._run_length = last + RUN_SMOOTHING * (num_steps - last)

    def is_known(self, shape: TreeShape, size: RoundSize) -> bool:
        """Whether rounds of this size were measured a few times."""
        times = self._rounds.get((shape, size.kind))
        return times is not None and times.is_sure(size.num_slots)

    def round_s(self, shape: TreeShape, size: RoundSize) -> float:
        """Returns the expected seconds of one round among others; 0 before any of its shape and
        kind was measured."""
        times = self._rounds.get((shape, size.kind))
        return 0.0 if times is None else times(size.num_slots)

    def entry_s(self, size: RoundSize, num_steps: int) -> float:
        """Returns what each round of a run bears of the time that the run's beginning takes.

        Args:
            num_steps: in a row so far, which may be more than usual.
        """
        entry = self._entries.get(size.num_slots)
        if entry is None or self._run_length is None:
            return 0.0
        return entry.value / max(self._run_length, num_steps, 1)

    def measured(self) -> dict[tuple[TreeShape, int], float]:
        """Returns the typical seconds of what was measured, by shape and slots; those of one kind
        of sampling where there are several."""
        return {
            (shape, num_slots): duration_s
            for (shape, _), times in self._rounds.items()
            for num_slots, duration_s in times.measured().items()
        }
