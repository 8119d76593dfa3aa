"""Candidates of a step over the wire: what comes out is what went in, or is refused by name."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.candidate_columns import CandidateColumns
from shared.errors import InvalidArgument
from shared.pb.outrider.speculation.v1 import speculation_service_pb2 as pb
from shared.rpc.columns import (
    TreeLimits,
    add_candidates,
    candidates_from_message,
    report_from_message,
)
from shared.tokens import (
    EMPTY_TREE,
    NO_REPORT,
    Candidate,
    Condition,
    DraftReport,
    TokenTree,
    TreeShape,
)
from tests.helpers.wire_values import candidates, shapes

ANY = TreeLimits(max_nodes=256, vocab_size=2**31, max_depth=256)
TREE = TokenTree((5, 6, 7), (None, 0, None), (-0.5, -1.0, -2.0))


def _sent(found: list[Candidate], report: DraftReport = NO_REPORT) -> pb.CandidateBatch:
    batch = pb.CandidateBatch()
    add_candidates(batch, CandidateColumns.of(found), report)
    return pb.CandidateBatch.FromString(batch.SerializeToString())


@given(st.lists(candidates, max_size=4))
def test_candidates_survive_the_wire(found: list[Candidate]) -> None:
    assert list(candidates_from_message(_sent(found), ANY)) == found


@given(st.none() | st.integers(0, 10**9), st.none() | shapes, st.booleans())
def test_report_of_a_draft_survives_the_wire(
    draft_ns: int | None, pinned: TreeShape | None, is_warming: bool
) -> None:
    report = DraftReport(None if draft_ns is None else draft_ns / 1e9, pinned, is_warming)
    assert report_from_message(_sent([], report)) == report


def test_condition_on_no_node_is_not_the_condition_on_node_0() -> None:
    sent = [Candidate(1, 1, 1, TREE, Condition(node, 7)) for node in (None, 0)]
    found = candidates_from_message(_sent(sent), ANY)
    assert [each.condition for each in found] == [Condition(None, 7), Condition(0, 7)]


def test_columns_that_say_nothing_are_left_out() -> None:
    batch = _sent([Candidate(1, 2, 3, TokenTree.chain([4]))])
    said = {field.name for field, _ in batch.ListFields()}
    fence = {"sequence_ids", "rounds", "committed_token_counts"}
    assert said == fence | {"node_offsets", "token_ids", "parent_indices"}


def test_runs_are_candidates_of_one_fence_side_by_side() -> None:
    ahead = [Candidate(1, 2, 3, TREE, Condition(None, bonus), bonus) for bonus in (8, 9)]
    found = [Candidate(1, 2, 3, TREE), *ahead, Candidate(1, 3, 3, TREE), Candidate(4, 3, 3, TREE)]
    runs = [
        (run.sequence_id, run.is_conditional, run.places)
        for run in CandidateColumns.of(found).runs()
    ]
    assert runs == [
        (1, False, range(1)),
        (1, True, range(1, 3)),
        (1, False, range(3, 4)),
        (4, False, range(4, 5)),
    ]


Breaks = Callable[[pb.CandidateBatch], None]


def _set(name: str, values: list[float]) -> Breaks:
    def break_it(batch: pb.CandidateBatch) -> None:
        del getattr(batch, name)[:]
        getattr(batch, name).extend(values)

    return break_it


@pytest.mark.parametrize(
    ("break_it", "said"),
    [
        (_set("rounds", [1]), "rounds has 1 entries; it must have 2"),
        (_set("committed_token_counts", []), "committed_token_counts has 0 entries"),
        (_set("candidate_ids", [1, 2, 3]), "candidate_ids has 3 entries; it must have 2"),
        (_set("condition_candidate_ids", [1]), "condition_candidate_ids has 1 entries"),
        (_set("condition_bonus_token_ids", [1, 1]), "2 bonus tokens of conditions, but 0 nodes"),
        (_set("shape_numbers", [1, 0]), "shape_numbers holds 1; shapes has 0"),
        (_set("node_offsets", [0, 3]), "node_offsets has 2 entries; it must have one more"),
        (_set("node_offsets", [1, 3, 5]), "node_offsets begins at 1"),
        (_set("node_offsets", [0, 6, 5]), "node_offsets descends from 6 to 5 at 2"),
        (_set("node_offsets", [0, 3, 6]), "node_offsets ends at 6; token_ids has 5 entries"),
        (_set("parent_indices", [-1, 0, -1, -1]), "parent_indices has 4 entries"),
        (_set("parent_indices", [-1, 0, -1, -1, 1]), "node 1 has parent 1"),
        (_set("parent_indices", [-1, 0, -1, 2, 0]), "node 0 has parent 2"),
        (_set("parent_indices", [-1, 0, -2, -1, 0]), "parent index -2 is below -1"),
        (_set("token_ids", [1, 2, 3, 4, 100]), "token 100 is outside the vocabulary [0, 100)"),
        (_set("token_ids", [1, 2, -3, 4, 5]), "token -3 is outside the vocabulary"),
        (_set("log_probs", [-1.0]), "5 token ids but 1 log probabilities"),
        (_set("log_probs", [-1.0, math.nan, -1.0, -1.0, -1.0]), "is not finite"),
        (_set("log_probs", [-1.0, -1.0, -1.0, -1.0, -math.inf]), "is not finite"),
        (_set("log_probs", [math.nan, math.nan, math.nan, math.inf, -1.0]), "is not finite"),
    ],
)
def test_columns_that_do_not_fit_are_refused_by_name(break_it: Breaks, said: str) -> None:
    batch = _sent([Candidate(1, 2, 3, TREE), Candidate(2, 2, 3, TokenTree.chain([8, 9]))])
    limits = TreeLimits(max_nodes=3, vocab_size=100, max_depth=3)
    candidates_from_message(batch, limits)
    break_it(batch)
    with pytest.raises(InvalidArgument) as caught:
        candidates_from_message(batch, limits)
    assert caught.value.reason == "TREE_MALFORMED"
    assert said in caught.value.message


def test_trees_beyond_the_limits_are_refused() -> None:
    chain = [Candidate(1, 2, 3, EMPTY_TREE), Candidate(2, 2, 3, TokenTree.chain([1, 2, 3]))]
    with pytest.raises(InvalidArgument, match="3 nodes; the target accepts 2"):
        candidates_from_message(_sent(chain), TreeLimits(2, 9, 9))
    with pytest.raises(InvalidArgument, match="a node at depth 3"):
        candidates_from_message(_sent(chain), TreeLimits(3, 9, 2))
    wide = [Candidate(1, 2, 3, TREE)]
    assert list(candidates_from_message(_sent(wide), TreeLimits(3, 9, 2))) == wide
