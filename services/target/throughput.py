"""The throughput of a choice: its tokens, from the acceptance of drafted tokens by tree level, over
its seconds, from a table measured at start-up. No torch."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from shared.tokens import ShapeOrPlain, TreeShape

MEMORY, UNTRIED_MEMORY = 0.98, 0.995
"""Decay of a level's trials in a round that tries the level, and in a round that does not."""
LEAST_TRIALS = 16.0
"""Floor of the second decay: a level's last trials count until there are new ones."""
FIRST_RATE, FIRST_WEIGHT = 0.75, 4.0
"""Prior of a level's acceptance rate, and the number of trials it is worth."""
FORGET_S = 30.0
"""A choice that was not tried for so long is hoped to be twice as good as it was then."""


@dataclass(slots=True)
class _Level:
    """Trials of one level of a tree; older ones weigh less.

    Attributes:
        prior_fades: see `Acceptance`.
        prior_trials: number of trials that the prior is worth.
    """

    prior_fades: bool = False
    trials: float = 0.0
    hits: float = 0.0
    prior_trials: float = FIRST_WEIGHT

    def observe(self, num_trials: int, num_hits: int) -> None:
        """Adds the trials of a round, perhaps none."""
        memory = MEMORY
        if not num_trials:
            memory = UNTRIED_MEMORY if self.trials > LEAST_TRIALS else 1.0
        self.trials = memory * self.trials + num_trials
        self.hits = memory * self.hits + num_hits
        if self.prior_fades:
            self.prior_trials *= memory

    def rate(self, prior: float) -> float:
        """Returns the share of hits."""
        return (self.hits + self.prior_trials * prior) / (self.trials + self.prior_trials)


FIRST_FORESEEN = 0.9
"""Prior of the share of verdicts that a draft foresees."""
_Kind: TypeAlias = tuple[int, bool]
"""Breadth (top-k) of the trees, and whether their sequences are greedy."""


class Acceptance:
    """Acceptance rate of each tree level after an accepted one, by kind of trees and sampling, and
    the share of verdicts that were foreseen where trees grow ahead.

    A tree grown ahead is accepted like any other of its kind, if there is one. So what is seen of
    either way of drafting tells about both.

    Estimates of levels and breadths that are not in use slowly become uncertain. Uncertain ones are
    estimated with a margin on top, so that they are tried again.

    Args:
        prior_fades: the prior of an acceptance rate loses weight with each round, as trials do.
            Otherwise some tokens are expected even where none is ever accepted.
    """

    def __init__(self, *, prior_fades: bool = False) -> None:
        self._prior_fades = prior_fades
        self._levels: dict[_Kind, list[_Level]] = {}
        self._foreseen = {is_greedy: _Level() for is_greedy in (False, True)}

    def observe(
        self, shape: TreeShape, *, is_greedy: bool, accepted: Sequence[int], num_unforeseen: int = 0
    ) -> None:
        """Counts rounds with trees of a shape.

        Args:
            accepted: number of accepted nodes of each tree.
            num_unforeseen: rounds without a tree, because none was grown for the verdict before.
        """
        num_foreseen = len(accepted) if shape.is_ahead else 0
        self._foreseen[is_greedy].observe(num_foreseen + num_unforeseen, num_foreseen)
        if not accepted:
            return
        tried = self._levels.setdefault((shape.topk, is_greedy), [])
        depth = min(shape.num_steps, shape.max_node_count)
        tried.extend(_Level(self._prior_fades) for _ in range(len(tried), depth))
        for (_, kind), levels in self._levels.items():
            if kind is not is_greedy:
                continue
            for index, level in enumerate(levels):
                num_trials = num_hits = 0
                if levels is tried and index < depth:
                    num_trials = sum(count >= index for count in accepted)
                    num_hits = sum(count > index for count in accepted)
                level.observe(num_trials, num_hits)

    def tokens(self, shape: TreeShape, *, is_greedy: bool, hope: float = 0.0) -> float:
        """Returns the tokens that a round is expected to commit, bonus included.

        Args:
            hope: optimism, added to each rate, together with twice the largest standard deviation
                that a rate of so few trials can have; 0 adds neither.
        """
        total, survival = 1.0, 1.0
        if shape.is_ahead:
            foreseen = self._foreseen[is_greedy]
            survival = _hoped(foreseen.rate(FIRST_FORESEEN), foreseen.trials, hope)
        for rate, num_trials in self._rates(shape, is_greedy=is_greedy):
            survival *= _hoped(rate, num_trials, hope)
            total += survival
        return total

    def rates(self, shape: TreeShape, *, is_greedy: bool) -> list[float]:
        """Returns the acceptance rate of each level of a tree after an accepted one.

        A kind that was never tried has the rates of the most similar kind.
        """
        return [rate for rate, _ in self._rates(shape, is_greedy=is_greedy)]

    def _rates(self, shape: TreeShape, *, is_greedy: bool) -> list[tuple[float, float]]:
        """Returns the rate of each level, and its number of trials."""
        nearest = min(
            (kind for kind in self._levels if kind[1] is is_greedy),
            key=lambda kind: abs(math.log2(kind[0] / shape.topk)),
            default=None,
        )
        levels = self._levels[nearest] if nearest else []
        rates, rate = list[tuple[float, float]](), FIRST_RATE
        for index in range(min(shape.num_steps, shape.max_node_count)):
            level = levels[index] if index < len(levels) else _Level()
            rate = level.rate(rate)
            rates.append((rate, level.trials))
        return rates


def _hoped(rate: float, num_trials: float, hope: float) -> float:
    """Returns a rate with the margin of `Acceptance.tokens`."""
    margin = hope + 1.0 / math.sqrt(1.0 + num_trials) if hope else 0.0
    return min(rate + margin, 1.0)


@dataclass(slots=True)
class CostTable:
    """Seconds of a step by number of sequences.

    Attributes:
        plain: of plain steps.
        rounds: of rounds, by the shape of their trees.
    """

    plain: dict[int, float] = field(default_factory=dict)
    rounds: dict[TreeShape, dict[int, float]] = field(default_factory=dict)

    def seconds(self, choice: ShapeOrPlain, num_sequences: int) -> float | None:
        """Returns the time of a step; None if the choice was never measured."""
        times = self.plain if choice is None else self.rounds.get(choice, {})
        return _between(times, num_sequences)

    def measured(self) -> dict[tuple[ShapeOrPlain, int], float]:
        """Returns the seconds of steps by choice and number of sequences."""
        choices: list[ShapeOrPlain] = [None, *self.rounds]
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


def compared(rates: Mapping[ShapeOrPlain, float], num_sequences: int) -> str:
    """Returns the tokens per second of plain steps and of the best trees, as text."""
    trees = {shape: rate for shape, rate in rates.items() if shape is not None}
    best = max(trees, key=lambda shape: trees[shape], default=None)
    figures = [f"plain steps {rates[None]:,.0f} tokens/s"] if None in rates else []
    if best is not None:
        shape = f"{best.num_steps} deep, {best.topk} wide"
        shape += ", drafted ahead" if best.is_ahead else ""
        figures.append(f"the best trees ({shape}) {trees[best]:,.0f} tokens/s")
    sequences = "1 sequence" if num_sequences == 1 else f"{num_sequences} sequences"
    return f"with {sequences}: {', '.join(figures)}"
