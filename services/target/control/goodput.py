"""What a batch is expected to commit in a second, drafted for or not. No torch.

*Goodput* is the rate of committed tokens. A round of a sequence that is drafted for costs the wait
for its tree and a share of a wider step, and commits 1 token and the accepted nodes; a plain round
costs a share of a narrow step and commits 1. Everything here is arithmetic on estimates that are
handed in.

Source: goodput as the objective, Liu et al., arXiv 2406.14066.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

StepTime = Callable[[int], float]
"""Seconds of a step by its rows."""

WaitTime = Callable[[int, int], float]
"""Seconds from a verdict to the next trees, by their depth and the number of sequences."""

ROUNDING = 1e-9


@dataclass(frozen=True, slots=True)
class Part:
    """Sequences that step together.

    Attributes:
        num_sequences: at least one.
        tokens: committed in a round by all of them.
        num_rows: of their part of the forward.
        wait_s: before each of their rounds.
    """

    num_sequences: int
    tokens: float
    num_rows: int
    wait_s: float = 0.0

    @property
    def is_drafted(self) -> bool:
        return self.num_rows > self.num_sequences


@dataclass(frozen=True, slots=True)
class Cycle:
    """What a batch commits from one step of all its sequences to the next."""

    tokens: float
    duration_s: float

    @property
    def goodput(self) -> float:
        """Tokens a second."""
        return self.tokens / self.duration_s if self.duration_s > 0 else 0.0


def cycle(parts: Sequence[Part], step_s: StepTime, slowdown: float = 1.0) -> Cycle:
    """Returns the cycle of sequences that decode side by side.

    While the slowest part waits, the quickest steps alone, over and over; a step that has begun is
    finished, however soon the trees come. Then all step together.

    Args:
        slowdown: how much longer a step takes while a draft computes, at least 1; above it where
            they share a device.
    """
    longest_s = max(part.wait_s for part in parts)
    quickest = min(parts, key=lambda part: part.wait_s)
    round_s = quickest.wait_s + slowdown * step_s(quickest.num_rows)
    slack = (longest_s - quickest.wait_s) / round_s if round_s > 0 else 0.0
    before_s = math.ceil(slack - ROUNDING) * round_s + quickest.wait_s
    tokens = 0.0
    for part in parts:
        own_s = part.wait_s + slowdown * step_s(part.num_rows)
        spare_s = before_s - part.wait_s
        num_more = math.floor(spare_s / own_s + ROUNDING) if own_s > 0 else 0
        tokens += part.tokens * (1 + num_more)
    return Cycle(tokens, before_s + step_s(sum(part.num_rows for part in parts)))


@dataclass(frozen=True, slots=True)
class Device:
    """What decoding costs the target.

    Attributes:
        step_s: seconds of a step by its rows.
        slowdown: see `cycle`.
        stretch: how much longer cycles with drafted sequences take than is expected of them.
    """

    step_s: StepTime
    slowdown: float = 1.0
    stretch: float = 1.0

    def goodput(self, parts: Sequence[Part]) -> float:
        """Returns the expected tokens a second of sequences that decode side by side."""
        is_drafted = any(part.is_drafted for part in parts)
        goodput = cycle(parts, self.step_s, self.slowdown).goodput
        return goodput / self.stretch if is_drafted else goodput
