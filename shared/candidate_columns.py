"""The candidates of one step as columns, without a Python object per node. No torch or protobuf."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import accumulate, chain, groupby
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from shared.tokens import Candidate, Condition, TokenTree, TreeShape

T = TypeVar("T", int, float)
CandidateRow = tuple[int, int, int, int, int, int, int, TreeShape | None, TokenTree]
"""A candidate: sequence id, round, committed token count, candidate id or 0, the three numbers of a
`ConditionKey` (`UNCONDITIONAL` without a condition), shape and tree."""
Numbers = list[int] | NDArray[np.int32]
Reals = list[float] | NDArray[np.float32]

ConditionKey = tuple[int, int, int]
"""A condition as three numbers: the last accepted node or -1, the bonus token, and the id of the
candidate that has the node or 0."""
UNCONDITIONAL: ConditionKey = -1, -1, 0


class Run(NamedTuple):
    """Adjacent candidates of one sequence.

    Attributes:
        places: their indices in the columns.
    """

    sequence_id: int
    round: int
    committed_token_count: int
    is_conditional: bool
    places: range


@dataclass(slots=True, eq=False)
class CandidateColumns:
    """Candidates as columns. Entry i of each column before `node_offsets` belongs to candidate i;
    see `Candidate`.

    Attributes:
        candidate_ids: 0 for a candidate without an id.
        node_indices, bonus_token_ids, conditioned_ids: the condition, as in a `ConditionKey`; the
            bonus token is -1 for an unconditional candidate.
        node_offsets: where each tree begins in the columns of nodes, then the length of these.
        token_ids, parent_indices: of the nodes; a parent of -1 is the last committed token.
        log_probs: of the nodes; NaN for a tree without log probabilities.
        trees: the trees as objects, if they were drafted in this process: a chain there keeps the
            distributions that it was drawn from. Empty if the columns were received.
    """

    sequence_ids: list[int] = field(default_factory=list)
    rounds: list[int] = field(default_factory=list)
    committed_token_counts: list[int] = field(default_factory=list)
    candidate_ids: list[int] = field(default_factory=list)
    node_indices: list[int] = field(default_factory=list)
    bonus_token_ids: list[int] = field(default_factory=list)
    conditioned_ids: list[int] = field(default_factory=list)
    shapes: list[TreeShape | None] = field(default_factory=list)
    node_offsets: list[int] = field(default_factory=lambda: [0])
    token_ids: Numbers = field(default_factory=list)
    parent_indices: Numbers = field(default_factory=list)
    log_probs: Reals = field(default_factory=list)
    trees: list[TokenTree] = field(default_factory=list)

    @classmethod
    def of(cls, candidates: Iterable[Candidate]) -> CandidateColumns:
        """Returns candidates as columns."""
        return cls.of_rows([_row(candidate) for candidate in candidates])

    @classmethod
    def of_rows(cls, rows: Iterable[CandidateRow]) -> CandidateColumns:
        columns = list(zip(*rows, strict=True))
        if not columns:
            return cls()
        sequence_ids, rounds, counts, candidate_ids, *keys, shapes, trees = map(list, columns)
        nodes, bonuses, conditioned_ids = keys
        parents = chain.from_iterable([tree.parent_indices for tree in trees])
        return cls(
            sequence_ids=sequence_ids,
            rounds=rounds,
            committed_token_counts=counts,
            candidate_ids=candidate_ids,
            node_indices=nodes,
            bonus_token_ids=bonuses,
            conditioned_ids=conditioned_ids,
            shapes=shapes,
            node_offsets=list(accumulate([len(tree.token_ids) for tree in trees], initial=0)),
            token_ids=list(chain.from_iterable([tree.token_ids for tree in trees])),
            parent_indices=[-1 if parent is None else parent for parent in parents],
            log_probs=list(
                chain.from_iterable([tree.log_probs or [math.nan] * len(tree) for tree in trees])
            ),
            trees=trees,
        )

    def __len__(self) -> int:
        return len(self.sequence_ids)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, CandidateColumns) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]

    def __iter__(self) -> Iterator[Candidate]:
        return map(self.candidate, range(len(self)))

    def runs(self) -> Iterator[Run]:
        """Yields runs of adjacent candidates with the same fence, all or none with a condition."""
        is_conditional = [bonus >= 0 for bonus in self.bonus_token_ids]
        columns = self.sequence_ids, self.rounds, self.committed_token_counts, is_conditional
        start = 0
        for key, run in groupby(zip(*columns, strict=True)):
            end = start + sum(1 for _ in run)
            yield Run(*key, range(start, end))
            start = end

    def keys(self, places: range) -> Iterator[ConditionKey]:
        """Returns the conditions of adjacent candidates, all conditional."""
        run = slice(places.start, places.stop)
        columns = self.node_indices[run], self.bonus_token_ids[run], self.conditioned_ids[run]
        return zip(*columns, strict=True)

    def candidate(self, place: int) -> Candidate:
        condition, bonus_token_id = None, self.bonus_token_ids[place]
        if bonus_token_id >= 0:
            node_index = self.node_indices[place]
            node = None if node_index < 0 else node_index
            condition = Condition(node, bonus_token_id, self.conditioned_ids[place] or None)
        return Candidate(
            self.sequence_ids[place],
            self.rounds[place],
            self.committed_token_counts[place],
            self.tree(place),
            condition,
            self.candidate_ids[place] or None,
            self.shapes[place],
        )

    def tree(self, place: int) -> TokenTree:
        if self.trees:
            return self.trees[place]
        nodes = slice(self.node_offsets[place], self.node_offsets[place + 1])
        log_probs = _as_list(self.log_probs[nodes])
        has_log_probs = bool(log_probs) and not math.isnan(log_probs[0])
        return TokenTree(
            tuple(_as_list(self.token_ids[nodes])),
            tuple([None if node < 0 else node for node in _as_list(self.parent_indices[nodes])]),
            tuple(log_probs) if has_log_probs else (),
        )


def condition_key(condition: Condition) -> ConditionKey:
    node_index = -1 if condition.node_index is None else condition.node_index
    return node_index, condition.bonus_token_id, condition.candidate_id or 0


def _row(candidate: Candidate) -> CandidateRow:
    condition = candidate.condition
    key = UNCONDITIONAL if condition is None else condition_key(condition)
    fence = candidate.sequence_id, candidate.round, candidate.committed_token_count
    return *fence, candidate.candidate_id or 0, *key, candidate.shape, candidate.tree


def _as_list(column: list[T] | NDArray[Any]) -> list[T]:
    values: list[T] = column if isinstance(column, list) else column.tolist()
    return values
