"""How long the target waits for one draft's candidates. No torch; the clock is an argument.

A draft that answers is waited for, a few times as long as it usually takes. A draft that has gone
silent is given a chance now and then, each twice as long after the last, and a longer one if
something of it has arrived since, however late. So a frozen process costs next to nothing, one that
thaws is found again, and one that has become slow is, too.
"""

from __future__ import annotations

from dataclasses import dataclass, field

MISSES_UNTIL_COLD = 3
FIRST_PROBE_S = 0.25
LAST_PROBE_S = 8.0
WAIT_PER_RESPONSE = 4.0
WAIT_PER_TRIED_RESPONSE = 2.0
SMOOTHING = 0.2
SMOOTHING_DOWN = 0.4
"""Of waits that get shorter: a draft that is not waited for is seldom tried again."""
SHORTEST_WAIT_S = 0.02
STIRRING_FACTOR = 4.0


@dataclass(slots=True)
class Patience:
    """Wait budget of one attachment.

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
        """Whether the draft has gone silent."""
        return self._num_misses >= MISSES_UNTIL_COLD

    def has_no_chance(self, now_s: float) -> bool:
        """Whether the draft has gone silent, and is not given another chance yet."""
        return self.is_cold and now_s < self._probe_s

    @property
    def response_s(self) -> float | None:
        """How long the draft usually takes to answer a verdict; None before the first answer."""
        return self._response_s

    @property
    def usual_wait_s(self) -> float | None:
        """How long an answer is usually waited for, in vain or not; None before the first one."""
        return self._usual_wait_s

    @property
    def answer_rate(self) -> float:
        """How often an answer comes before the end of the wait, or of the round."""
        return self._answer_rate

    @property
    def wait_s(self) -> float:
        """The wait a warm draft is given."""
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
        """As `deadline_s`, for a draft that is tried after a pause: until when one that says
        nothing is waited for.

        Args:
            affordable_s: what it may cost; less than it usually needs is no try.
        """
        needed_s = max(WAIT_PER_TRIED_RESPONSE * (self._response_s or 0.0), SHORTEST_WAIT_S)
        most_s = min(self._take_chance_s(), self.longest_wait_s)
        return now_s + min(max(needed_s, affordable_s), most_s)

    def _take_chance_s(self) -> float:
        """Returns the wait that a silent draft is given: longer once after it has stirred."""
        is_stirring, self._is_stirring = self._is_stirring, False
        return STIRRING_FACTOR * self.wait_s if is_stirring else self.wait_s

    @property
    def is_doubtful(self) -> bool:
        """Whether what is known of its answers is from before a pause."""
        return self._is_doubtful

    def doubt(self) -> None:
        """A pause has ended: the next answer says more than all before."""
        self._is_doubtful = True

    def stirred(self) -> None:
        """Candidates arrived, for whatever round."""
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
        """The tree for a round that begins was pushed ahead: nobody waits for it."""
        if self._usual_wait_s is not None:
            self._usual_wait_s = _smoothed(self._usual_wait_s, 0.0)
        self._answer_rate += SMOOTHING * (1.0 - self._answer_rate)
        self._num_misses = 0

    def missed(self, now_s: float, waited_s: float = 0.0) -> None:
        """A round went by without its candidate. Rounds of one step count once.

        Args:
            waited_s: in vain.
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
