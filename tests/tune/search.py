"""Finds a good tree shape with few measurements: one parameter at a time, from the best so far."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True, order=True)
class Shape:
    """Of trees: depth, children of a node, rows verified with the root included."""

    steps: int
    topk: int
    tokens: int

    def __str__(self) -> str:
        return f"{self.steps}/{self.topk}/{self.tokens}"

    @property
    def is_possible(self) -> bool:
        """A chain has one row a step and the root; a tree no more rows than it can have nodes."""
        if self.topk == 1:
            return self.tokens == self.steps + 1
        return self.steps + 1 <= self.tokens <= 1 + self.topk + (self.steps - 1) * self.topk**2


Measure = Callable[[Shape], Awaitable[float]]
"""Returns what is to be large, for example tokens a second."""

AXES: Mapping[str, Sequence[int]] = {
    "steps": (1, 2, 3, 4, 5, 7),
    "topk": (1, 2, 4, 8),
    "tokens": (4, 8, 16, 32, 64),
}


def neighbours(shape: Shape, axis: str, axes: Mapping[str, Sequence[int]] = AXES) -> list[Shape]:
    """Returns the possible shapes along one axis, `shape` left out.

    The rows of a chain follow its depth, and a tree that becomes possible only with other rows
    gets as many as are nearest.
    """
    found = set()
    for value in axes[axis]:
        moved = replace(shape, **{axis: value})
        rows = [moved.tokens] if axis == "tokens" else [moved.steps + 1, *axes["tokens"]]
        fits = [each for t in rows if (each := replace(moved, tokens=t)).is_possible]
        if fits:
            found.add(min(fits, key=lambda each: abs(each.tokens - shape.tokens)))
    return sorted(found - {shape})


async def coordinate_descent(
    start: Shape, measure: Measure, *, axes: Mapping[str, Sequence[int]] = AXES, max_rounds: int = 3
) -> dict[Shape, float]:
    """Tries each axis from the best shape so far until a round brings nothing.

    Returns:
        Every shape that was measured, with its figure; each was measured once.
    """
    trials = {start: await measure(start)}
    for _ in range(max_rounds):
        before = best_of(trials)
        for axis in axes:
            for shape in neighbours(best_of(trials), axis, axes):
                if shape not in trials:
                    trials[shape] = await measure(shape)
        if best_of(trials) == before:
            break
    return trials


def best_of(trials: Mapping[Shape, float]) -> Shape:
    """Returns the shape with the largest figure; of equal ones the smallest tree."""
    return min(trials, key=lambda shape: (-trials[shape], shape.tokens, shape))
