"""Step times measured at start-up. No torch."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, field

from shared.tokens import Choice, TreeShape


@dataclass(slots=True)
class CostTable:
    """Seconds of a step by number of sequences.

    Attributes:
        plain: of plain steps.
        rounds: of rounds, by the shape of their trees.
    """

    plain: dict[int, float] = field(default_factory=dict)
    rounds: dict[TreeShape, dict[int, float]] = field(default_factory=dict)

    def seconds(self, choice: Choice, num_sequences: int) -> float | None:
        """Returns the time of a step; None if the choice was never measured."""
        times = self.plain if choice is None else self.rounds.get(choice, {})
        return _between(times, num_sequences)

    def measured(self) -> dict[tuple[Choice, int], float]:
        """Returns the seconds of steps by choice and number of sequences."""
        choices: list[Choice] = [None, *self.rounds]
        return {
            (choice, num_sequences): seconds
            for choice in choices
            for num_sequences, seconds in (
                self.plain if choice is None else self.rounds[choice]
            ).items()
        }


def _between(times: Mapping[int, float], num_sequences: int) -> float | None:
    """Interpolates between the measured numbers of sequences."""
    if not times:
        return None
    sizes = sorted(times)
    place = bisect_left(sizes, num_sequences)
    if place == 0:
        return times[sizes[0]]
    if place == len(sizes):
        return times[sizes[-1]] * num_sequences / sizes[-1]
    low, high = sizes[place - 1], sizes[place]
    share = (num_sequences - low) / (high - low)
    return times[low] + share * (times[high] - times[low])
