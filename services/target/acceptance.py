"""Estimates of how likely drafted tokens are accepted, by tree level. No torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from shared.tokens import TreeShape

MEMORY = 0.98
"""Share of its weight that a round's acceptance keeps when its level is tried again."""
FIRST_RATE, FIRST_WEIGHT = 0.75, 4.0
"""Acceptance that a level is taken to have before anything is known, and the trials it is worth."""


@dataclass(slots=True)
class _Level:
    """Trials of one level of a tree, older ones weighing less."""

    trials: float = 0.0
    hits: float = 0.0


class Acceptance:
    """Acceptance rate of each level after an accepted one, by breadth and kind of sampling."""

    def __init__(self) -> None:
        self._levels: dict[tuple[int, bool], list[_Level]] = {}

    def observe(self, shape: TreeShape, *, is_greedy: bool, accepted: Sequence[int]) -> None:
        """Counts rounds with trees of a shape by the nodes that each accepted."""
        if not accepted:
            return
        levels = self._levels.setdefault((shape.topk, is_greedy), [])
        depth = min(shape.num_steps, shape.max_node_count)
        levels.extend(_Level() for _ in range(len(levels), depth))
        for index, level in enumerate(levels[:depth]):
            num_trials = sum(count >= index for count in accepted)
            if not num_trials:
                break
            level.trials = MEMORY * level.trials + num_trials
            level.hits = MEMORY * level.hits + sum(count > index for count in accepted)

    def tokens(self, shape: TreeShape, *, is_greedy: bool, hope: float = 0.0) -> float:
        """Returns the tokens that a round is expected to commit, bonus included.

        A breadth that was never tried promises what the next one that was does.

        Args:
            hope: added to the rate of every level.
        """
        total, survival = 1.0, 1.0
        for rate in self.rates(shape, is_greedy=is_greedy):
            survival *= min(rate + hope, 1.0)
            total += survival
        return total

    def rates(self, shape: TreeShape, *, is_greedy: bool) -> list[float]:
        """Returns how often each level of a tree is accepted where the one before was."""
        tried = [topk for topk, kind in self._levels if kind is is_greedy]
        nearest = min(tried, key=lambda topk: abs(math.log2(topk / shape.topk)), default=0)
        levels = self._levels.get((nearest, is_greedy), [])
        rates, rate = list[float](), FIRST_RATE
        for index in range(min(shape.num_steps, shape.max_node_count)):
            level = levels[index] if index < len(levels) else _Level()
            rate = (level.hits + FIRST_WEIGHT * rate) / (level.trials + FIRST_WEIGHT)
            rates.append(rate)
        return rates
