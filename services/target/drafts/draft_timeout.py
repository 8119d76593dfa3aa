"""The time that the target waits for the trees of one draft. No torch; the clock is an argument.

The timeout is a few times the usual response time of the draft. After three misses in a row the
draft counts as silent: the target waits for it only in probes, whose gaps double. A probe is longer
if any message of the draft has arrived since the last one. So a frozen process costs almost
nothing, and a draft that recovers or has become slow is found again.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

LONGEST_S = 5.0
"""A longer warm-up is ignored. Kernels that are compiled for the first time take seconds."""


@dataclass(slots=True)
class DraftWarmUp:
    """The warm-up of one attachment.

    Its trees are late during a warm-up, so the target neither waits for them nor measures them.
    """

    _since_s: float | None = None
    _until_s: float = -math.inf

    def report(self, now_s: float, *, is_warming: bool) -> None:
        """Takes a report of the draft."""
        since_s = self._since_s
        self._since_s = (now_s if since_s is None else since_s) if is_warming else None
        if not is_warming and since_s is not None:
            self._until_s = min(now_s, since_s + LONGEST_S)

    def is_on(self, now_s: float) -> bool:
        """Whether a warm-up is under way."""
        return self._since_s is not None and now_s < self._since_s + LONGEST_S

    def was_on(self, since_s: float, now_s: float) -> bool:
        """Whether a warm-up was under way at any time from `since_s` until now."""
        last_s = -math.inf if self._since_s is None else min(self._since_s + LONGEST_S, now_s)
        return self.is_on(now_s) or max(last_s, self._until_s) > since_s


MISSES_UNTIL_COLD = 3
FIRST_PROBE_S = 0.25
LAST_PROBE_S = 1.0
WAIT_PER_RESPONSE = 4.0
SMOOTHING = 0.2
SHORTEST_WAIT_S = 0.02
STIRRING_FACTOR = 4.0


@dataclass(slots=True)
class DraftTimeout:
    """The timeout of one attachment.

    Attributes:
        longest_wait_s: upper bound of a wait; 0 never waits.
        response_s: usual time to answer a verdict; None before the first answer.
    """

    longest_wait_s: float
    response_s: float | None = None
    _num_misses: int = 0
    _last_miss_s: float | None = None
    _is_stirring: bool = False
    _probe_s: float = 0.0
    _probe_gap_s: float = field(default=FIRST_PROBE_S)

    @property
    def is_cold(self) -> bool:
        """Whether the draft is silent."""
        return self._num_misses >= MISSES_UNTIL_COLD

    def has_no_chance(self, now_s: float) -> bool:
        """Whether the draft is silent and its next probe is not due."""
        return self.is_cold and now_s < self._probe_s

    @property
    def wait_s(self) -> float:
        """The timeout of a draft that is not silent."""
        if self.response_s is None:
            return self.longest_wait_s
        wanted = max(WAIT_PER_RESPONSE * self.response_s, SHORTEST_WAIT_S)
        return min(wanted, self.longest_wait_s)

    def deadline_s(self, now_s: float) -> float:
        """Called when a verdict goes out: until when its sequence waits for the next tree."""
        if not self.is_cold:
            return now_s + self.wait_s
        if now_s < self._probe_s:
            return now_s
        self._probe_s = now_s + self._probe_gap_s
        self._probe_gap_s = min(2.0 * self._probe_gap_s, LAST_PROBE_S)
        is_stirring, self._is_stirring = self._is_stirring, False
        wait_s = STIRRING_FACTOR * self.wait_s if is_stirring else self.wait_s
        return now_s + min(wait_s, self.longest_wait_s)

    def stirred(self) -> None:
        """Candidates arrived, for any round."""
        self._is_stirring = True

    def heard(self, response_s: float | None) -> None:
        """A candidate for a current round arrived.

        Args:
            response_s: time since its verdict; None when the draft had more to do than to answer
                a verdict, such as reading a prompt.
        """
        if response_s is not None:
            known_s = self.response_s
            self.response_s = (
                response_s if known_s is None else known_s + SMOOTHING * (response_s - known_s)
            )
        self._num_misses = 0
        self._probe_gap_s = FIRST_PROBE_S

    def in_time(self) -> None:
        """The tree of a round that begins was pushed ahead, so there is no wait."""
        self._num_misses = 0

    def missed(self, now_s: float) -> None:
        """A round ended without its candidate. Rounds of one step count once."""
        if now_s != self._last_miss_s:
            self._num_misses += 1
            self._last_miss_s = now_s
