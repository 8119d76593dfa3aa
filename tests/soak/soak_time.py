"""How long a soak goes on: its minutes begin when the first request has finished."""

from __future__ import annotations

import time
from collections.abc import Callable

from tests.soak.soak import SoakFailed, SoakFigures


class SoakTime:
    """Says before every step whether traffic goes on.

    On a GPU whose kernels are not compiled the first step alone takes half a minute, since a head
    that attaches has its graphs captured. So what comes before the first answer is warm-up.

    Args:
        figures: of the soak, live.
        seconds: of traffic behind the warm-up.
        limit_s: longest warm-up.
    """

    def __init__(
        self,
        figures: SoakFigures,
        seconds: float,
        limit_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.seconds = seconds
        self._figures, self._limit_s, self._clock = figures, limit_s, clock
        self._start_s = clock()
        self._warm_s: float | None = None

    def goes_on(self) -> bool:
        """Whether there is time left.

        Raises:
            SoakFailed: the warm-up takes longer than its limit.
        """
        if self._warm_s is None:
            waited_s = self._clock() - self._start_s
            if self._figures.num_finished:
                self._warm_s = self._clock()
            elif waited_s >= self._limit_s:
                raise SoakFailed(
                    f"no request has finished after {waited_s:.0f} s;"
                    f" the warm-up may take {self._limit_s:.0f} s"
                )
        return self._warm_s is None or self.traffic_s < self.seconds

    @property
    def warm_up_s(self) -> float:
        """What the warm-up took, or has taken so far."""
        return (self._clock() if self._warm_s is None else self._warm_s) - self._start_s

    @property
    def traffic_s(self) -> float:
        """Time since the first request finished; 0 until then."""
        return 0.0 if self._warm_s is None else self._clock() - self._warm_s
