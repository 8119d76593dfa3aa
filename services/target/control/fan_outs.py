"""Whether drafting ahead pays, and for how many verdicts: tried and measured. No torch.

A draft that prepares for verdicts saves waits, and may slow the target down or come too late. How
much follows from the hardware, so no model of it is kept: each budget is in force for some rounds
in turn, and what a round then commits in how much time decides. While it is not known yet whether
speculation pays at all, a budget is in force for whole trials of that.
"""

from __future__ import annotations

from dataclasses import dataclass, field

BUDGETS: tuple[int | None, ...] = (None, 4, 0)
"""What is tried: all that the draft would by itself, a few, none."""

NUM_TRIAL_ROUNDS = 64
"""Rounds with a budget before it can be chosen or left; of more than 4 sequences in proportion."""

NUM_FIRST_ROUNDS = 192
"""The same before the others are tried for the first time: depths are still being chosen."""

NUM_HINT_ROUNDS = 16
CLEARLY_WORSE = 0.75
"""A budget that commits less than this part of the best one's tokens a second after so many rounds
is left at once."""

FEW_SEQUENCES = 4

ROUNDS_BETWEEN_TRIALS = 2048
"""A budget that was left is tried again after so many rounds of each sequence, so that trials of
the two others cost at most 2 * 64 / 2048 of what they lose."""

TRIALS_A_BUDGET = 2
"""Trials of speculation with the draft's own budget, then as many without drafting ahead."""

MIN_GAIN = 1.02
MEMORY = 0.99
"""Share of its weight that a round of each sequence leaves to those before."""


@dataclass(slots=True)
class _Arm:
    """Rounds under one budget, with exponential forgetting."""

    tokens: float = 0.0
    time_s: float = 0.0
    num_rounds: int = 0
    tried_at: int = 0

    def add(self, num_tokens: int, duration_s: float, memory: float) -> None:
        self.tokens = memory * self.tokens + num_tokens
        self.time_s = memory * self.time_s + duration_s
        self.num_rounds += 1

    @property
    def rate(self) -> float:
        return self.tokens / self.time_s if self.time_s > 0 else 0.0


@dataclass(slots=True)
class FanOut:
    """The choice for one draft and about one number of sequences.

    Attributes:
        size: least number of sequences that it is for.
        num_trials: of speculation, while that is not known to pay; None once it is, or where nobody
            asks.
    """

    size: int = 1
    num_trials: int | None = None
    _arms: list[_Arm] = field(default_factory=lambda: [_Arm() for _ in BUDGETS])
    _best: int = 0
    _trial: int | None = 0
    _num_rounds: int = 0

    @property
    def budget(self) -> int | None:
        """What to ask for now; None leaves it to the draft."""
        if self.num_trials is not None:
            pairs_before = max(self.num_trials - 1, 0) // TRIALS_A_BUDGET
            return BUDGETS[-1] if pairs_before % 2 else BUDGETS[0]
        return BUDGETS[self._best if self._trial is None else self._trial]

    @property
    def is_trying(self) -> bool:
        """Whether another budget than the best is in force, to learn what it is worth."""
        return self.num_trials is None and self._trial not in (None, self._best)

    def observe(self, budget: int | None, num_tokens: int, duration_s: float) -> None:
        """Takes in a round from verdict to verdict.

        Args:
            budget: that was asked for when it began.
        """
        index = BUDGETS.index(budget)
        self._arms[index].add(num_tokens, duration_s, MEMORY ** (1 / self.size))
        if self.num_trials is not None:
            # What pays, if this does, is what is tried now.
            self._best = self._trial = index
            return
        self._num_rounds += 1
        if self._trial is not None and index == self._trial:
            self._end_trial(self._arms[index])
        if self._trial is None:
            self._trial = self._next_trial()

    def _end_trial(self, arm: _Arm) -> None:
        is_first = sum(each.num_rounds > 0 for each in self._arms) == 1
        needed = NUM_FIRST_ROUNDS if is_first else NUM_TRIAL_ROUNDS
        if arm.rate < CLEARLY_WORSE * self._arms[self._best].rate:
            needed = NUM_HINT_ROUNDS
        if arm.num_rounds < needed * max(self.size / FEW_SEQUENCES, 1.0):
            return
        arm.tried_at = self._num_rounds
        best = max(range(len(BUDGETS)), key=lambda index: self._arms[index].rate)
        if self._arms[best].rate > MIN_GAIN * self._arms[self._best].rate:
            self._best = best
        self._trial = None

    def _next_trial(self) -> int | None:
        for index, arm in enumerate(self._arms):
            is_due = self._num_rounds - arm.tried_at >= ROUNDS_BETWEEN_TRIALS * self.size
            if index != self._best and (arm.num_rounds == 0 or is_due):
                arm.num_rounds, arm.tokens, arm.time_s = 0, 0.0, 0.0
                return index
        return None


class FanOuts:
    """The choices for one draft, by about how many sequences it has.

    Attributes:
        num_trials: see `FanOut`.
    """

    def __init__(self) -> None:
        self.num_trials: int | None = None
        self._by_size: dict[int, FanOut] = {}

    def of(self, num_sequences: int) -> FanOut:
        """Returns the choice for so many; that of an octave is one."""
        octave = num_sequences.bit_length()
        found = self._by_size.get(octave)
        if found is None:
            found = self._by_size[octave] = FanOut(1 << max(octave - 1, 0))
        found.num_trials = self.num_trials
        return found
