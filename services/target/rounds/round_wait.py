"""Computes how long the host may sleep while a round is under way. No torch, no clocks.

Looking whether a round is done keeps the interpreter from the thread that takes in what drafts
push meanwhile. So nobody looks before the round may be about to end.
"""

from __future__ import annotations

POLL_S = 1e-4
"""How often to look from then on."""
_SURE_SHARE = 0.9
_DRIFT = 0.02
"""What rounds may slow down by, one after the other, until the quickest is no measure any more."""


class RoundWait:
    """Remembers how quick rounds have been lately."""

    def __init__(self) -> None:
        self._quick_s = 0.0

    def timed(self, round_s: float) -> None:
        """A round took so long."""
        known_s = self._quick_s or round_s
        self._quick_s = min(round_s, known_s * (1.0 + _DRIFT))

    def patience_s(self, elapsed_s: float) -> float:
        """Returns how long to sleep, unless something arrives.

        Args:
            elapsed_s: since the round under way began, or a little less.
        """
        return max(_SURE_SHARE * self._quick_s - elapsed_s, POLL_S)
