"""The time that the target waits for the trees of one draft. No torch; the clock is an argument.

The timeout is a few times the usual response time of the draft. After three misses in a row the
draft counts as silent: the target waits for it only in probes, whose gaps double. A probe is longer
if any message of the draft has arrived since the last one. So a frozen process costs almost
nothing, and a draft that recovers or has become slow is found again.
"""

from __future__ import annotations

from dataclasses import dataclass, field

MISSES_UNTIL_COLD = 3
FIRST_PROBE_S = 0.25
LAST_PROBE_S = 1.0
WAIT_PER_RESPONSE = 4.0
WAIT_PER_TRIED_RESPONSE = 2.0
SMOOTHING = 0.2
SMOOTHING_DOWN = 0.4
"""Smoothing of waits that get shorter. Larger, because a draft with long waits is seldom tried."""
SHORTEST_WAIT_S = 0.02
STIRRING_FACTOR = 4.0


@dataclass(slots=True)
class DraftTimeout:
    """The timeout of one attachment.

    Attributes:
        longest_wait_s: upper bound of a wait; 0 never waits.
    """

    longest_wait_s: float
    _response_s: float | None = None
    _usual_wait_s: float | None = None
    _answer_rate: float = 1.0
    _num_misses: int = 0
    _last_miss_s: float | None = None
    _is_stirring: bool = False
    _is_doubtful: bool = False
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
    def response_s(self) -> float | None:
        """The draft's usual response time to a verdict; None before the first answer."""
        return self._response_s

    @property
    def usual_wait_s(self) -> float | None:
        """The usual wait for an answer, whether it came or not; None before the first one."""
        return self._usual_wait_s

    @property
    def answer_rate(self) -> float:
        """Share of the answers that arrive in time."""
        return self._answer_rate

    @property
    def wait_s(self) -> float:
        """The timeout of a draft that is not silent."""
        if self._response_s is None:
            return self.longest_wait_s
        wanted = max(WAIT_PER_RESPONSE * self._response_s, SHORTEST_WAIT_S)
        return min(wanted, self.longest_wait_s)

    def deadline_s(self, now_s: float) -> float:
        """Called when a verdict goes out: until when its sequence waits for the next tree."""
        if not self.is_cold:
            return now_s + self.wait_s
        if now_s < self._probe_s:
            return now_s
        self._probe_s = now_s + self._probe_gap_s
        self._probe_gap_s = min(2.0 * self._probe_gap_s, LAST_PROBE_S)
        return now_s + min(self._take_chance_s(), self.longest_wait_s)

    def try_deadline_s(self, now_s: float, affordable_s: float) -> float:
        """Returns the deadline in a trial after a backoff.

        Args:
            affordable_s: what the trial may cost; it lasts at least as long as the draft usually
                needs.
        """
        needed_s = max(WAIT_PER_TRIED_RESPONSE * (self._response_s or 0.0), SHORTEST_WAIT_S)
        most_s = min(self._take_chance_s(), self.longest_wait_s)
        return now_s + min(max(needed_s, affordable_s), most_s)

    def _take_chance_s(self) -> float:
        """Returns the wait of a probe: longer if a message has arrived since the last one."""
        is_stirring, self._is_stirring = self._is_stirring, False
        return STIRRING_FACTOR * self.wait_s if is_stirring else self.wait_s

    @property
    def is_doubtful(self) -> bool:
        """Whether all known response times are from before a backoff."""
        return self._is_doubtful

    def doubt(self) -> None:
        """A backoff has ended: the next answer replaces all known response times."""
        self._is_doubtful = True

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
            if self._is_doubtful:
                self._response_s = self._usual_wait_s = None
                self._answer_rate, self._is_doubtful = 1.0, False
            self._response_s = _smoothed(self._response_s, response_s)
            known_s = self._usual_wait_s
            is_faster = known_s is not None and response_s < known_s
            smoothing = SMOOTHING_DOWN if is_faster else SMOOTHING
            self._usual_wait_s = _smoothed(known_s, response_s, smoothing)
        self._answer_rate += SMOOTHING * (1.0 - self._answer_rate)
        self._num_misses = 0
        self._probe_gap_s = FIRST_PROBE_S

    def in_time(self) -> None:
        """The tree of a round that begins was pushed ahead, so there is no wait."""
        if self._usual_wait_s is not None:
            self._usual_wait_s = _smoothed(self._usual_wait_s, 0.0)
        self._answer_rate += SMOOTHING * (1.0 - self._answer_rate)
        self._num_misses = 0

    def missed(self, now_s: float, waited_s: float = 0.0) -> None:
        """A round ended without its candidate. Rounds of one step count once.

        Args:
            waited_s: for the candidate.
        """
        if now_s == self._last_miss_s:
            return
        self._num_misses += 1
        self._last_miss_s = now_s
        self._answer_rate -= SMOOTHING * self._answer_rate
        if self._usual_wait_s is not None:
            self._usual_wait_s = _smoothed(self._usual_wait_s, waited_s)


def _smoothed(known: float | None, value: float, smoothing: float = SMOOTHING) -> float:
    return value if known is None else known + smoothing * (value - known)
