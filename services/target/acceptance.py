"""Estimates of how likely drafted tokens are accepted, by tree level. No torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from shared.tokens import TreeShape

MEMORY, UNTRIED_MEMORY = 0.98, 0.995
"""Share of their weight that the trials of a level keep in a round that tries it, and in others."""
LEAST_TRIALS = 16.0
"""Trials that others leave a level: what was seen last counts until it is seen again."""
FIRST_RATE, FIRST_WEIGHT = 0.75, 4.0
"""Acceptance that a level is taken to have before anything is known, and the trials it is worth."""
FORGET_S = 30.0
"""What was not seen for so long is hoped to be twice as good as when it was."""


@dataclass(slots=True)
class _Level:
    """Trials of one level of a tree, older ones weighing less."""

    trials: float = 0.0
    hits: float = 0.0


_Kind: TypeAlias = tuple[int, bool, bool]
"""Breadth of the trees, whether they grow ahead, and whether their lanes are greedy."""


class Acceptance:
    """Acceptance rate of each level after an accepted one, by kind of trees and sampling.

    Where trees grow ahead, a verdict that was not foreseen is a first level that was not accepted.

    What is known of levels and breadths that are not in use becomes uncertain by and by, so that
    they are hoped to be better and tried again.
    """

    def __init__(self) -> None:
        self._levels: dict[_Kind, list[_Level]] = {}

    def observe(self, shape: TreeShape, *, is_greedy: bool, accepted: Sequence[int]) -> None:
        """Counts rounds with trees of a shape by the nodes that each accepted."""
        if not accepted:
            return
        own = self._levels.setdefault((shape.topk, shape.is_ahead, is_greedy), [])
        depth = min(shape.num_steps, shape.max_node_count)
        own.extend(_Level() for _ in range(len(own), depth))
        for (*_, kind), levels in self._levels.items():
            if kind is not is_greedy:
                continue
            for index, level in enumerate(levels):
                num_trials = num_hits = 0
                if levels is own and index < depth:
                    num_trials = sum(count >= index for count in accepted)
                    num_hits = sum(count > index for count in accepted)
                memory = MEMORY
                if not num_trials:
                    memory = UNTRIED_MEMORY if level.trials > LEAST_TRIALS else 1.0
                level.trials = memory * level.trials + num_trials
                level.hits = memory * level.hits + num_hits

    def tokens(self, shape: TreeShape, *, is_greedy: bool, hope: float = 0.0) -> float:
        """Returns the tokens that a round is expected to commit, bonus included.

        Args:
            hope: added to the rate of every level, with twice the standard deviation that a rate of
                so few trials has at most; 0 adds neither.
        """
        total, survival = 1.0, 1.0
        for rate, num_trials in self._rates(shape, is_greedy=is_greedy):
            margin = hope + 1.0 / math.sqrt(1.0 + num_trials) if hope else 0.0
            survival *= min(rate + margin, 1.0)
            total += survival
        return total

    def rates(self, shape: TreeShape, *, is_greedy: bool) -> list[float]:
        """Returns how often each level of a tree is accepted where the one before was.

        A kind that was never tried promises what the one does that is most like it.
        """
        return [rate for rate, _ in self._rates(shape, is_greedy=is_greedy)]

    def _rates(self, shape: TreeShape, *, is_greedy: bool) -> list[tuple[float, float]]:
        """Returns the rate of each level, and the trials behind it."""
        tried = [kind for kind in self._levels if kind[2] is is_greedy]
        nearest = min(
            tried,
            key=lambda kind: (kind[1] is not shape.is_ahead, abs(math.log2(kind[0] / shape.topk))),
            default=None,
        )
        levels = self._levels[nearest] if nearest else []
        rates, rate = list[tuple[float, float]](), FIRST_RATE
        for index in range(min(shape.num_steps, shape.max_node_count)):
            level = levels[index] if index < len(levels) else _Level()
            rate = (level.hits + FIRST_WEIGHT * rate) / (level.trials + FIRST_WEIGHT)
            rates.append((rate, level.trials))
        return rates
