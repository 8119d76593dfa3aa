"""Token throughput, measured between calls."""

from __future__ import annotations

from services.target.clock import Clock

_SHORTEST_S = 1.0


class Throughput:
    """Tokens a second between the last two questions that lay a second or more apart.

    Calls within the window get the same answer, so that frequent calls do not make it jump.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._since_s = clock()
        self._since_tokens = 0
        self._rate = 0.0

    def rate(self, num_tokens: int) -> float:
        """Returns the rate.

        Args:
            num_tokens: all tokens since the start.
        """
        now_s = self._clock()
        elapsed_s = now_s - self._since_s
        if elapsed_s >= _SHORTEST_S:
            self._rate = (num_tokens - self._since_tokens) / elapsed_s
            self._since_s, self._since_tokens = now_s, num_tokens
        return self._rate
