"""Backoff from a draft whose trees do not arrive in time. No torch, no clocks.

A draft that is silent, or too slow to be worth waiting for, gets no tree requests for a while, and
the target decodes as without it. Then comes a trial: the target waits for a few of its trees. Each
failed trial makes the next backoff longer, so that trials cost a small share of the time.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

MISSES_WHEN_SILENT = 3
MISSES_WHEN_SLOW = 16
"""Rounds in a row without a tree, for each sequence, before a backoff begins."""
TRIED_ROUNDS = 4
FIRST_PAUSE_S = 0.25
LAST_PAUSE_S = 1.0
TRY_COST = 0.03
"""Share of the time that trials may take."""


@dataclass(slots=True)
class Backoff:
    """The backoff from one draft, for all of its sequences at once."""

    _is_on: bool = False
    _is_trying: bool = False
    _until_s: float = -math.inf
    _resumed_s: float = -math.inf
    _length_s: float = 0.0
    _num_missed: int = 0
    _num_verified: int = 0
    _waited_s: float = 0.0

    @property
    def is_on(self) -> bool:
        """Whether a backoff is in force, until the next trial."""
        return self._is_on

    @property
    def is_trying(self) -> bool:
        """Whether a trial is under way."""
        return self._is_trying

    @property
    def affordable_s(self) -> float:
        """The longest time that a trial may wait for trees."""
        return TRY_COST * self._length_s

    def count(self, now_s: float, waited_s: float, *, was_verified: bool) -> None:
        """A round for which a tree was requested has ended.

        Args:
            waited_s: for the tree, whether it came or not.
        """
        self._waited_s += waited_s
        self._num_verified += was_verified
        self._num_missed = 0 if was_verified else self._num_missed + 1
        if self._is_trying and self._num_verified >= TRIED_ROUNDS:
            self._is_trying, self._resumed_s = False, now_s

    def end(self) -> None:
        """The cause of the backoff is over: the next trial begins at once, and later ones soon."""
        self._until_s = -math.inf
        self._length_s = 0.0

    def lasts(self, now_s: float) -> bool:
        """Whether a backoff is in force and its time is not over."""
        return self._is_on and now_s < self._until_s

    def goes_on(self, now_s: float) -> bool:
        """Whether a backoff is in force. If its time is over, it ends and a trial begins."""
        if self._is_on and now_s >= self._until_s:
            self._is_on, self._is_trying = False, True
            self._num_missed, self._num_verified, self._waited_s = 0, 0, 0.0
        return self._is_on

    def begins(self, now_s: float, num_sequences: int, *, is_silent: bool, pays: bool) -> bool:
        """Begins a backoff if the draft is of no use; returns whether one is in force.

        Args:
            num_sequences: that it has.
            is_silent: it has not answered lately.
            pays: its trees are worth waiting for, as far as is known.
        """
        if self._is_trying:
            has_failed = self._num_missed >= num_sequences or not pays
        else:
            num_allowed = MISSES_WHEN_SILENT if is_silent else MISSES_WHEN_SLOW
            is_of_use = pays and not is_silent
            has_failed = not is_of_use and self._num_missed >= num_allowed * num_sequences
        if has_failed:
            # Its sequences have waited at the same time.
            self._begin(now_s, self._waited_s / max(num_sequences, 1))
        return self._is_on

    def _begin(self, now_s: float, waited_s: float) -> None:
        if self._is_trying:
            fair_s = min(waited_s / TRY_COST, LAST_PAUSE_S)
            self._length_s = max(self._next_length_s, fair_s)
        elif now_s - self._resumed_s >= self._length_s:
            self._length_s = FIRST_PAUSE_S
        else:  # the trial succeeded for a moment only
            self._length_s = self._next_length_s
        self._is_on, self._is_trying = True, False
        self._until_s = now_s + self._length_s

    @property
    def _next_length_s(self) -> float:
        return max(FIRST_PAUSE_S, min(2.0 * self._length_s, LAST_PAUSE_S))
