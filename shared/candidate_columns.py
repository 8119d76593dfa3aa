"""The candidates of one step in columns: a number costs no object. No torch, no protobuf."""

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
"""A candidate: sequence id, round, committed tokens, its own id or 0, a `ConditionKey`, which is
`UNCONDITIONAL` where there is none, the shape and the tree."""
Numbers = list[int] | NDArray[np.int32]
Reals = list[float] | NDArray[np.float32]

ConditionKey = tuple[int, int, int]
"""A condition as three numbers: the last accepted node or -1, the bonus token, and the candidate
that the node counts in or 0."""
UNCONDITIONAL: ConditionKey = -1, -1, 0


class Run(NamedTuple):
    """Candidates of one sequence that lie side by side.

    Attributes:
        places: in the columns.
    """

    sequence_id: int
    round: int
    committed_token_count: int
    is_conditional: bool
    places: range


@dataclass(slots=True, eq=False)
class CandidateColumns:
    """Entry i of each of the first columns is about candidate i; see `Candidate`.

    Attributes:
        candidate_ids: 0 for a tree that has no name.
        node_indices, bonus_token_ids, conditioned_ids: of the condition, as in a `ConditionKey`; a
            bonus token of -1 for an unconditional tree.
        node_offsets: where each tree begins in the columns of nodes, and their length.
        token_ids, parent_indices: of the nodes; a parent of -1 is the last committed token.
        log_probs: of the nodes; NaN where a tree has none.
        trees: as they were drafted in this process, such as chains with the distributions that they
            were drawn from; none where the columns came by the wire.
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
        """Returns candidates in columns, which they may be already."""
        if isinstance(candidates, CandidateColumns):
            return candidates
        return cls.of_rows([_row(each) for each in candidates])

    @classmethod
    def of_rows(cls, rows: Iterable[CandidateRow]) -> CandidateColumns:
        """Returns candidates in columns."""
        columns = list(zip(*rows, strict=True))
        if not columns:
            return cls()
        ids, rounds, counts, own_ids, nodes, bonuses, named, shapes, trees = map(list, columns)
        parents = chain.from_iterable([each.parent_indices for each in trees])
        return cls(
            sequence_ids=ids,
            rounds=rounds,
            committed_token_counts=counts,
            candidate_ids=own_ids,
            node_indices=nodes,
            bonus_token_ids=bonuses,
            conditioned_ids=named,
            shapes=shapes,
            node_offsets=list(accumulate([len(each.token_ids) for each in trees], initial=0)),
            token_ids=list(chain.from_iterable([each.token_ids for each in trees])),
            parent_indices=[-1 if each is None else each for each in parents],
            log_probs=list(
                chain.from_iterable([each.log_probs or [math.nan] * len(each) for each in trees])
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
        """Yields candidates side by side that have one fence and are all conditional, or none."""
        is_conditional = [bonus >= 0 for bonus in self.bonus_token_ids]
        columns = self.sequence_ids, self.rounds, self.committed_token_counts, is_conditional
        start = 0
        for key, run in groupby(zip(*columns, strict=True)):
            end = start + sum(1 for _ in run)
            yield Run(*key, range(start, end))
            start = end

    def keys(self, places: range) -> Iterator[ConditionKey]:
        """Returns the conditions of candidates side by side that have one."""
        own = slice(places.start, places.stop)
        columns = self.node_indices[own], self.bonus_token_ids[own], self.conditioned_ids[own]
        return zip(*columns, strict=True)

    def candidate(self, place: int) -> Candidate:
        """Returns one candidate."""
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
        """Returns the tree of one candidate."""
        if self.trees:
            return self.trees[place]
        nodes = slice(self.node_offsets[place], self.node_offsets[place + 1])
        log_probs = _listed(self.log_probs[nodes])
        has_log_probs = bool(log_probs) and not math.isnan(log_probs[0])
        return TokenTree(
            tuple(_listed(self.token_ids[nodes])),
            tuple([None if each < 0 else each for each in _listed(self.parent_indices[nodes])]),
            tuple(log_probs) if has_log_probs else (),
        )


def condition_key(condition: Condition) -> ConditionKey:
    """Returns a condition as numbers."""
    node_index = -1 if condition.node_index is None else condition.node_index
    return node_index, condition.bonus_token_id, condition.candidate_id or 0


def _row(each: Candidate) -> CandidateRow:
    condition = UNCONDITIONAL if each.condition is None else condition_key(each.condition)
    fence = each.sequence_id, each.round, each.committed_token_count
    return *fence, each.candidate_id or 0, *condition, each.shape, each.tree


def _listed(part: list[T] | NDArray[Any]) -> list[T]:
    listed: list[T] = part if isinstance(part, list) else part.tolist()
    return listed
