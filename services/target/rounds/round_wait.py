"""When the host launches a round, and how long it may sleep while one is under way. No torch."""

from __future__ import annotations

import math
from collections.abc import Iterable

ASKING_S = 5e-5
"""About what it costs to read the choice from the device and to launch then."""
_SMOOTHING = 0.1


class EarlyLaunch:
    """Weighs one against the other, by what rounds take and how often drafts foresee verdicts.

    Where a tree was prepared for the right ending, that saves the time in which the host learns so.
    Where none was for any sequence, the device computes a round for nobody, while it could have
    begun with the tree that the draft sends for the verdict.
    """

    def __init__(self) -> None:
        self._round_s = 0.0

    def timed(self, round_s: float) -> None:
        """A round took so long."""
        known = self._round_s or round_s
        self._round_s = known + _SMOOTHING * (round_s - known)

    def pays(self, hit_rates: Iterable[float], response_s: float) -> bool:
        """Whether to launch at once.

        Args:
            hit_rates: of the sequences that may take part, how likely each does.
            response_s: how long a draft takes to send a tree for a verdict.
        """
        for_nobody = math.prod(1.0 - rate for rate in hit_rates)
        lost_s = max(self._round_s - response_s, 0.0)
        return for_nobody * lost_s <= (1.0 - for_nobody) * ASKING_S


POLL_S = 1e-4
"""How often to look from then on."""
_SURE_SHARE = 0.9
_MARGIN_S = 1e-3
_HOST_SHARE = 1.5
_DRIFT = 0.02
"""What rounds may slow down by, one after the other, until the quickest is no measure any more."""


class RoundWait:
    """Remembers how quick rounds have been lately, and how long the host takes to launch one."""

    def __init__(self) -> None:
        self._quick_s = 0.0
        self._host_s = 0.0

    def timed(self, round_s: float) -> None:
        """A round took so long."""
        known_s = self._quick_s or round_s
        self._quick_s = min(round_s, known_s * (1.0 + _DRIFT))

    def launched(self, host_s: float) -> None:
        """The host took so long from the beginning of a turn to the end of a launch in which no
        sequence joined."""
        self._host_s = max(host_s, self._host_s * (1.0 - _DRIFT))

    def until_launch_s(self, elapsed_s: float) -> float:
        """Returns how long the next round need not be launched yet; 0 for at once.

        Args:
            elapsed_s: since the round under way began, or a little less.
        """
        last_s = _SURE_SHARE * self._quick_s - _MARGIN_S - _HOST_SHARE * self._host_s
        return max(last_s - elapsed_s, 0.0)

    def patience_s(self, elapsed_s: float) -> float:
        """Returns how long to sleep, unless something arrives.

        Args:
            elapsed_s: since the round under way began, or a little less.
        """
        return max(_SURE_SHARE * self._quick_s - elapsed_s, POLL_S)
