"""When requests of an open loop are sent: at times of their own, whatever is answered."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol


class Arrivals(Protocol):
    """Send times of an open loop."""

    def offsets_s(self) -> Iterator[float]:
        """Yields seconds since the start, ascending, without end."""


@dataclass(frozen=True, slots=True)
class Poisson:
    """Independent users: gaps are exponential.

    Attributes:
        rate: requests a second, on average.
    """

    rate: float
    seed: int = 0

    def offsets_s(self) -> Iterator[float]:
        source, now_s = random.Random(self.seed), 0.0
        while True:
            now_s += source.expovariate(self.rate)
            yield now_s


@dataclass(frozen=True, slots=True)
class Bursts:
    """Nothing, then many at once.

    Attributes:
        rate: requests a second, on average.
        size: requests of a burst.
    """

    rate: float
    size: int = 16

    def offsets_s(self) -> Iterator[float]:
        burst = 0
        while True:
            yield from [burst * self.size / self.rate] * self.size
            burst += 1


@dataclass(frozen=True, slots=True)
class Steady:
    """One after the other at equal gaps.

    Attributes:
        rate: requests a second.
    """

    rate: float

    def offsets_s(self) -> Iterator[float]:
        number = 0
        while True:
            yield number / self.rate
            number += 1


def arrivals_named(name: str, rate: float) -> Arrivals:
    """Returns a pattern by its flag.

    Raises:
        ValueError: names the patterns there are.
    """
    if name == "poisson":
        return Poisson(rate)
    if name == "burst":
        return Bursts(rate)
    if name == "steady":
        return Steady(rate)
    raise ValueError(f"arrivals are {name!r}; there is poisson, burst and steady")
