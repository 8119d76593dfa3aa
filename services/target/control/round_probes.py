"""Choices of rounds that are in force for a few steps only, to learn what they bring. No torch."""

from __future__ import annotations

from dataclasses import dataclass

from services.target.control.probe_budget import ProbeBudget
from shared.tokens import TreeShape

NUM_PROBE_STEPS = 4
MOST_PER_PROBE = 4.0
"""A probe is charged at most this many times what it is expected to take, so that a stall of the
machine does not forbid the next ones for long."""

Option = TreeShape | None
"""The shape of rounds; None for plain steps."""


@dataclass(frozen=True, slots=True)
class _Probe:
    """The one under way.

    Attributes:
        rate: tokens a second that the settled choice promised before.
        dearest_s: most that it is charged.
    """

    option: Option
    start_s: float
    num_committed: int
    rate: float
    dearest_s: float


class RoundProbes:
    """One at a time, within a budget.

    Attributes:
        num_committed: tokens so far, of whatever is in force; counted by the owner.
    """

    def __init__(self) -> None:
        self.budget = ProbeBudget()
        self.num_committed = 0
        self._probe: _Probe | None = None

    @property
    def is_under_way(self) -> bool:
        return self._probe is not None

    def in_force(self, settled: Option) -> Option:
        """Returns the choice that is probed; the settled one while none is."""
        return settled if self._probe is None else self._probe.option

    def start(self, option: Option, now_s: float, *, rate: float, step_s: float) -> None:
        """Puts a choice in force.

        Args:
            rate: tokens a second that the settled one promises.
            step_s: what a step of this one is expected to take.
        """
        dearest_s = MOST_PER_PROBE * NUM_PROBE_STEPS * step_s
        self._probe = _Probe(option, now_s, self.num_committed, rate, dearest_s)

    def end(self, now_s: float, rate: float | None) -> None:
        """Ends the one under way, if there is one. It costs its time less that in which the
        settled choice commits as much.

        Args:
            rate: what that promises now, of which the probe may have told; None if nobody knows.
        """
        probe, self._probe = self._probe, None
        if probe is not None:
            saved_s = (self.num_committed - probe.num_committed) / (rate or probe.rate)
            self.budget.pay(min(now_s - probe.start_s - saved_s, probe.dearest_s))
