"""What rounds on the device commit, by the shape of their trees. No torch.

A round tells how many levels of its tree were accepted, not which nodes, so chains and trees of
each breadth are counted apart. A level that is not tried keeps its rate: the shapes in force
change, and what was learnt of the others must not fade for that.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field

from services.target.control.acceptance import FIRST_RATE, MAX_LEVELS, expected_tokens
from services.target.sequence import Sequence
from shared.tokens import TreeShape

POPULATION_MEMORY = 0.97
POPULATION_STRENGTH = 2.0
SEQUENCE_STRENGTH = 8.0
_TEMPERATURES = (0.0, 0.4, 0.8)


@dataclass(slots=True)
class _Level:
    """Trials of one level, older ones weighing less."""

    trials: float = 0.0
    hits: float = 0.0


@dataclass(slots=True)
class _Levels:
    """How often each level is accepted where the one before was.

    Attributes:
        memory: share of its weight that a trial keeps when its level is tried again.
        strength: trials that the prior is worth.
    """

    memory: float
    strength: float
    levels: list[_Level] = field(default_factory=list)

    def observe(self, accepted: SequenceOf[int], num_levels: int) -> None:
        """Counts a round of `num_levels` levels by the levels that each sequence accepted."""
        num_tried = min(max(accepted) + 1, num_levels)
        self.levels.extend(_Level() for _ in range(len(self.levels), num_tried))
        for index in range(num_tried):
            level = self.levels[index]
            num_trials = sum(count >= index for count in accepted)
            num_hits = sum(count > index for count in accepted)
            level.trials = self.memory * level.trials + num_trials
            level.hits = self.memory * level.hits + num_hits

    def rates(self, num_levels: int, prior: SequenceOf[float] = ()) -> list[float]:
        """Returns the rate of each level; without a prior, one that was never tried is taken for
        as good as the one before it."""
        rates: list[float] = []
        last = FIRST_RATE
        for index in range(num_levels):
            level = self.levels[index] if index < len(self.levels) else _Level()
            imagined = self.strength * (prior[index] if prior else last)
            last = (level.hits + imagined) / (level.trials + self.strength)
            rates.append(last)
        return rates

    @property
    def is_tried(self) -> bool:
        return bool(self.levels)


class RoundAcceptance:
    """Rates of running sequences, and of all those before them for what they cannot tell yet."""

    def __init__(self, memory: float) -> None:
        """`memory` is what a sequence's round keeps of its weight at its next one."""
        self._memory = memory
        self._population: dict[tuple[int, int], _Levels] = {}
        self._sequences: dict[int, dict[int, _Levels]] = {}
        self.num_rounds = 0
        """Rounds of single sequences so far."""

    def observe(self, shape: TreeShape, decided: SequenceOf[tuple[Sequence, int]]) -> None:
        """Counts a round: each sequence and how many nodes of its tree were accepted."""
        num_levels = _num_levels(shape)
        by_kind: dict[int, list[int]] = {}
        for sequence, num_accepted in decided:
            by_kind.setdefault(_kind(sequence), []).append(num_accepted)
            own = self._sequences.setdefault(sequence.sequence_id, {})
            if shape.topk not in own:
                own[shape.topk] = _Levels(self._memory, SEQUENCE_STRENGTH)
            own[shape.topk].observe((num_accepted,), num_levels)
        for kind, accepted in by_kind.items():
            self._of_all(kind, shape.topk).observe(accepted, num_levels)
        self.num_rounds += len(decided)

    def forget(self, sequence: Sequence) -> None:
        """A sequence ended."""
        self._sequences.pop(sequence.sequence_id, None)

    def tokens(self, sequence: Sequence, shapes: SequenceOf[TreeShape]) -> list[float]:
        """Returns the tokens that a round with a tree of each shape is expected to commit.

        Chains that were never tried promise what trees do.
        """
        deepest = max(map(_num_levels, shapes))
        by_breadth = {
            topk: expected_tokens(self._rates(sequence, topk, deepest))
            for topk in {shape.topk for shape in shapes}
        }
        return [by_breadth[shape.topk][_num_levels(shape)] for shape in shapes]

    def _rates(self, sequence: Sequence, topk: int, num_levels: int) -> list[float]:
        prior = self._prior(sequence, topk, num_levels)
        own = self._sequences.get(sequence.sequence_id, {}).get(topk)
        return prior if own is None else own.rates(num_levels, prior)

    def _prior(self, sequence: Sequence, topk: int, num_levels: int) -> list[float]:
        found = self._of_all(_kind(sequence), topk)
        if found.is_tried or topk > 1:
            return found.rates(num_levels)
        tried = {
            breadth: levels
            for (breadth, kind), levels in self._population.items()
            if kind == _kind(sequence) and levels.is_tried
        }
        return tried[max(tried)].rates(num_levels) if tried else found.rates(num_levels)

    def _of_all(self, kind: int, topk: int) -> _Levels:
        key = (topk, kind)
        if key not in self._population:
            self._population[key] = _Levels(POPULATION_MEMORY, POPULATION_STRENGTH)
        return self._population[key]


def _num_levels(shape: TreeShape) -> int:
    return min(shape.num_steps, shape.max_node_count, MAX_LEVELS)


def _kind(sequence: Sequence) -> int:
    return sum(sequence.sampling.temperature > each for each in _TEMPERATURES)
