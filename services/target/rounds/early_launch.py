"""Whether to launch a round before it is known that any sequence takes part in it. No torch.

Where a tree was prepared for the right ending, that saves the time in which the host learns so.
Where none was for any sequence, the device computes a round for nobody, while it could have begun
with the tree that the draft sends for the verdict.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

ASKING_S = 5e-5
"""About what it costs to read the choice from the device and to launch then."""
_SMOOTHING = 0.1


class EarlyLaunch:
    """Weighs one against the other, by what rounds take and how often drafts foresee verdicts."""

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
