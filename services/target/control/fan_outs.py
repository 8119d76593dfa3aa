"""Whether drafting ahead pays, and for how many verdicts: tried and measured. No torch.

A draft that prepares for verdicts saves waits, and may slow the target down or come too late. How
much follows from the hardware, so no model of it is kept: each budget is in force for some rounds
in turn, and what a round then commits in how much time decides.
"""

from __future__ import annotations

from dataclasses import dataclass, field

BUDGETS: tuple[int | None, ...] = (None, 4, 0)
"""What is tried: all that the draft would by itself, a few, none."""

NUM_TRIAL_ROUNDS = 64
"""Rounds of a budget before it can be chosen or left."""

ROUNDS_BETWEEN_TRIALS = 2048
"""A budget that was left is tried again after so many rounds, so that trials of the two others
cost at most 2 * 64 / 2048 of what they lose."""

MIN_GAIN = 1.02
MEMORY = 0.99


@dataclass(slots=True)
class _Arm:
    """Rounds under one budget, with exponential forgetting."""

    tokens: float = 0.0
    time_s: float = 0.0
    num_rounds: int = 0
    tried_at: int = 0

    def add(self, num_tokens: int, duration_s: float) -> None:
        self.tokens = MEMORY * self.tokens + num_tokens
        self.time_s = MEMORY * self.time_s + duration_s
        self.num_rounds += 1

    @property
    def rate(self) -> float:
        return self.tokens / self.time_s if self.time_s > 0 else 0.0


@dataclass(slots=True)
class FanOut:
    """The choice for one draft and about one number of sequences."""

    _arms: list[_Arm] = field(default_factory=lambda: [_Arm() for _ in BUDGETS])
    _best: int = 0
    _trial: int | None = 0
    _num_rounds: int = 0

    @property
    def budget(self) -> int | None:
        """What to ask for now; None leaves it to the draft."""
        return BUDGETS[self._best if self._trial is None else self._trial]

    def observe(self, budget: int | None, num_tokens: int, duration_s: float) -> None:
        """Takes in a round from verdict to verdict.

        Args:
            budget: that was asked for when it began.
        """
        index = BUDGETS.index(budget)
        self._arms[index].add(num_tokens, duration_s)
        self._num_rounds += 1
        if self._trial is not None and index == self._trial:
            self._end_trial(self._arms[index])
        if self._trial is None:
            self._trial = self._next_trial()

    def _end_trial(self, arm: _Arm) -> None:
        if arm.num_rounds < NUM_TRIAL_ROUNDS:
            return
        arm.tried_at = self._num_rounds
        best = max(range(len(BUDGETS)), key=lambda index: self._arms[index].rate)
        if self._arms[best].rate > MIN_GAIN * self._arms[self._best].rate:
            self._best = best
        self._trial = None

    def _next_trial(self) -> int | None:
        for index, arm in enumerate(self._arms):
            is_due = self._num_rounds - arm.tried_at >= ROUNDS_BETWEEN_TRIALS
            if index != self._best and (arm.num_rounds == 0 or is_due):
                arm.num_rounds, arm.tokens, arm.time_s = 0, 0.0, 0.0
                return index
        return None


class FanOuts:
    """The choices for one draft, by about how many sequences it has."""

    def __init__(self) -> None:
        self._by_size: dict[int, FanOut] = {}

    def of(self, num_sequences: int) -> FanOut:
        """Returns the choice for so many; that of an octave is one."""
        return self._by_size.setdefault(num_sequences.bit_length(), FanOut())
