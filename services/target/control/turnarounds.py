"""How long a draft takes from a verdict to its next trees, by their depth. No torch.

The time runs from the end of the step with the verdict to the arrival of the answer, the hops and
the draft's other work included. A tree that was drafted ahead of its verdict is here by then, or
comes a little later; one that is drafted after it takes all of the draft's time. So the two are
kept apart, with the share of the former: what is usual is their mean.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from services.target.control.averages import Average, Typical

SHARE_SMOOTHING = 0.05
"""Weight of a round in the share of those whose tree was drafted ahead, once there are enough."""


@dataclass(slots=True)
class _Point:
    """Answers of one depth to one size of batch.

    Attributes:
        asked_s: until trees came that were drafted after their verdict.
        foreseen_s: until those came that were drafted ahead; 0 for all that were in time.
        share: of the latter, while the draft prepares for verdicts.
        draft_s: the drafter's own part of `asked_s`.
    """

    asked_s: Typical = field(default_factory=Typical)
    foreseen_s: Typical = field(default_factory=Typical)
    share: float = 0.0
    draft_s: Typical = field(default_factory=Typical)
    _num_shared: int = 0

    @property
    def is_sure(self) -> bool:
        return self.asked_s.is_sure or self.foreseen_s.is_sure

    def count(self, *, is_foreseen: bool) -> None:
        """Counts a round in which the draft prepares for verdicts."""
        self._num_shared += 1
        weight = max(1.0 / self._num_shared, SHARE_SMOOTHING)
        self.share += weight * (float(is_foreseen) - self.share)


_Depths = dict[int, _Point]


class Turnarounds:
    """Estimates of one attachment.

    Attributes:
        turnaround_s, draft_s: averages over every depth, for people.
    """

    def __init__(self) -> None:
        self.turnaround_s = Average()
        self.draft_s = Average()
        self._points: dict[int, _Depths] = {}

    @property
    def is_known(self) -> bool:
        """Whether any depth was measured a few times."""
        return any(_sure(depths) for depths in self._points.values())

    def observe(
        self,
        num_steps: int,
        num_sequences: int,
        turnaround_s: float,
        draft_s: float | None,
        *,
        is_foreseen: bool = False,
        is_ahead: bool = True,
    ) -> None:
        """Takes in one answered round.

        Args:
            num_steps: depth of the tree.
            num_sequences: sequences the draft worked for at the time.
            draft_s: the part in which the drafter computed; None when it did not say.
            is_foreseen: the tree was drafted ahead of the verdict.
            is_ahead: the draft could have prepared for it.
        """
        depths = self._points.setdefault(num_sequences.bit_length(), {})
        point = depths.setdefault(num_steps, _Point())
        self.turnaround_s.add(turnaround_s)
        if is_ahead:
            point.count(is_foreseen=is_foreseen)
        if is_foreseen:
            point.foreseen_s.add(turnaround_s)
            return
        point.asked_s.add(turnaround_s)
        if draft_s is not None:
            point.draft_s.add(draft_s)
            self.draft_s.add(draft_s)

    def __call__(self, num_steps: int, num_sequences: int, *, is_ahead: bool = True) -> float:
        """Returns the expected seconds; 0 before a depth was measured a few times, so that a draft
        is not judged by its first answers.

        Another batch size counts as the nearest measured one. Another depth is interpolated, or
        extrapolated; what is drafted ahead is hoped to be in time until that was tried.

        Args:
            is_ahead: whether the draft prepares for verdicts.
        """
        depths = self._nearest_batch(num_sequences.bit_length())
        if not depths:
            return 0.0
        asked_s = _asked_s(depths, num_steps)
        share = _share(depths, num_steps) if is_ahead else 0.0
        if not share:
            return asked_s
        return share * _foreseen_s(depths, num_steps) + (1.0 - share) * asked_s

    def _nearest_batch(self, size: int) -> _Depths:
        sure = {batch: _sure(depths) for batch, depths in self._points.items()}
        known = [batch for batch, depths in sure.items() if depths]
        if not known:
            return {}
        return sure[min(known, key=lambda each: (abs(each - size), each))]


def _sure(depths: _Depths) -> _Depths:
    return {depth: point for depth, point in depths.items() if point.is_sure}


def _share(depths: _Depths, num_steps: int) -> float:
    """Of the nearest depth."""
    nearest = min(depths, key=lambda depth: (abs(depth - num_steps), depth))
    return depths[nearest].share


def _asked_s(depths: _Depths, num_steps: int) -> float:
    """Where one depth is known, others differ by the drafter's own time a level."""
    times_s = _known(depths, lambda point: point.asked_s)
    if not times_s:
        return 0.0
    slope_s = 0.0
    if len(times_s) == 1:
        [depth] = times_s
        slope_s = depths[depth].draft_s.value / depth
    return _on_line(times_s, num_steps, slope_s)


def _foreseen_s(depths: _Depths, num_steps: int) -> float:
    times_s = _known(depths, lambda point: point.foreseen_s)
    return _on_line(times_s, num_steps, 0.0) if times_s else 0.0


def _known(depths: _Depths, typical: Callable[[_Point], Typical]) -> dict[int, float]:
    found = {depth: typical(point) for depth, point in sorted(depths.items())}
    return {depth: each.value for depth, each in found.items() if each.is_sure}


def _on_line(times_s: dict[int, float], num_steps: int, slope_s: float) -> float:
    """Returns the time of a depth, on the line between the nearest that are known.

    Args:
        times_s: at least one, by ascending depth.
        slope_s: a level, where only one is known.
    """
    if num_steps in times_s:
        return times_s[num_steps]
    below = [depth for depth in times_s if depth < num_steps]
    above = [depth for depth in times_s if depth > num_steps]
    if below and above:
        low, high = below[-1], above[0]
        share = (num_steps - low) / (high - low)
        return times_s[low] + share * (times_s[high] - times_s[low])
    near, *others = sorted(times_s, key=lambda depth: abs(depth - num_steps))
    if others:
        slope_s = max((times_s[others[0]] - times_s[near]) / (others[0] - near), 0.0)
    return max(times_s[near] + slope_s * (num_steps - near), 0.0)
