"""How long a draft takes from a verdict to its next trees, by their depth. No torch.

The time runs from the end of the step with the verdict to the arrival of the answer, the hops and
the draft's other work included, and is 0 when the tree was pushed ahead.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from services.target.control.averages import Average, Typical

HIT_SMOOTHING = 0.05
"""Weight of a round in the share of those whose tree was pushed ahead."""


@dataclass(slots=True)
class _Point:
    """Answers of one depth to one size of batch."""

    turnaround_s: Typical = field(default_factory=Typical)
    draft_s: Typical = field(default_factory=Typical)


class Turnarounds:
    """Estimates of one attachment.

    Attributes:
        turnaround_s, draft_s: averages over every depth, for people.
    """

    def __init__(self) -> None:
        self.turnaround_s = Average()
        self.draft_s = Average()
        self._hit_rate = 0.0
        self._points: dict[int, dict[int, _Point]] = {}

    @property
    def is_known(self) -> bool:
        """Whether any depth was measured a few times."""
        return any(_sure(depths) for depths in self._points.values())

    def observe(
        self, num_steps: int, num_sequences: int, turnaround_s: float, draft_s: float | None
    ) -> None:
        """Takes in one answered round.

        Args:
            num_steps: depth that was asked for.
            num_sequences: sequences the draft worked for at the time.
            draft_s: the part in which the drafter computed; None when it did not say.
        """
        depths = self._points.setdefault(num_sequences.bit_length(), {})
        point = depths.setdefault(num_steps, _Point())
        self.turnaround_s.add(turnaround_s)
        is_hit = turnaround_s <= 0.0
        self._hit_rate += HIT_SMOOTHING * (is_hit - self._hit_rate)
        if is_hit:
            return
        point.turnaround_s.add(turnaround_s)
        if draft_s is not None:
            point.draft_s.add(draft_s)
            self.draft_s.add(draft_s)

    def __call__(self, num_steps: int, num_sequences: int) -> float:
        """Returns the expected seconds; 0 before a depth was measured a few times, so that a draft
        is not judged by its first answers.

        Another batch size counts as the nearest measured one. Another depth is interpolated, or
        extrapolated by the drafter's own time a level.
        """
        depths = self._nearest_batch(num_sequences.bit_length())
        return self._missed(depths, num_steps) * (1.0 - self._hit_rate) if depths else 0.0

    def _missed(self, depths: dict[int, _Point], num_steps: int) -> float:
        """Of a round whose tree was not pushed ahead."""
        point = depths.get(num_steps)
        if point is not None:
            return point.turnaround_s.value
        below = max((depth for depth in depths if depth < num_steps), default=None)
        above = min((depth for depth in depths if depth > num_steps), default=None)
        if below is not None and above is not None:
            low_s = depths[below].turnaround_s.value
            high_s = depths[above].turnaround_s.value
            return low_s + (high_s - low_s) * (num_steps - below) / (above - below)
        known = below if below is not None else above
        assert known is not None
        return self._extrapolated(depths, known, num_steps)

    @staticmethod
    def _extrapolated(depths: dict[int, _Point], known: int, num_steps: int) -> float:
        """From one side only: by the slope between the two nearest depths, or by the drafter's
        time a level where only one is known."""
        point = depths[known]
        others = sorted(depths, key=lambda depth: abs(depth - num_steps))
        slope_s = point.draft_s.value / known
        if len(others) > 1:
            other = depths[others[1]]
            rise_s = other.turnaround_s.value - point.turnaround_s.value
            slope_s = max(rise_s / (others[1] - known), 0.0)
        return max(point.turnaround_s.value + slope_s * (num_steps - known), 0.0)

    def _nearest_batch(self, size: int) -> dict[int, _Point]:
        sure = {batch: _sure(depths) for batch, depths in self._points.items()}
        known = [batch for batch, depths in sure.items() if depths]
        if not known:
            return {}
        return sure[min(known, key=lambda each: (abs(each - size), each))]


def _sure(depths: dict[int, _Point]) -> dict[int, _Point]:
    return {depth: point for depth, point in depths.items() if point.turnaround_s.is_sure}
