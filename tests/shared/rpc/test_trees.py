"""Trees, candidates and verdicts over the wire; malformed ones are refused."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.errors import InvalidArgument
from shared.pb.outrider.speculation.v1 import speculation_service_pb2 as pb
from shared.pb.outrider.types.v1 import token_tree_pb2
from shared.rpc.trees import (
    add_candidates,
    add_verdicts,
    candidate_from_message,
    report_from_message,
    shape_from_message,
    shape_message,
    tree_from_message,
    tree_message,
    verdict_from_message,
)
from shared.tokens import (
    NO_REPORT,
    NO_TREE,
    Candidate,
    Condition,
    DraftReport,
    Outcome,
    TokenTree,
    TreeShape,
    TreeWish,
    Verdict,
)

int31 = st.integers(0, 2**31 - 1)
int63 = st.integers(0, 2**63 - 1)


@st.composite
def trees(draw: st.DrawFn) -> TokenTree:
    num_nodes = draw(st.integers(0, 12))
    parents = [
        draw(st.none() | st.integers(0, node - 1)) if node else None for node in range(num_nodes)
    ]
    tokens = draw(st.lists(int31, min_size=num_nodes, max_size=num_nodes))
    log_prob = st.floats(-1e6, 0, width=32)
    log_probs = draw(st.just([]) | st.lists(log_prob, min_size=num_nodes, max_size=num_nodes))
    return TokenTree(tuple(tokens), tuple(parents), tuple(log_probs))


ids = st.none() | int63
conditions = st.none() | st.builds(Condition, st.none() | int31, int31, ids)
candidates = st.builds(Candidate, int63, int63, int31, trees(), conditions, ids)
indices = st.lists(int31, max_size=5).map(tuple)
tokens = st.lists(int31, min_size=1, max_size=5).map(tuple)
shapes = st.builds(TreeShape, st.integers(1, 32), st.integers(1, 16), st.integers(2, 257))
wishes = st.just(NO_TREE) | st.builds(
    TreeWish, st.none() | shapes, num_outcomes=st.none() | st.integers(0, 64)
)
verdicts = st.builds(
    Verdict, int63, int63, st.sampled_from(Outcome), indices, tokens, int31, wishes, ids, ids
)


def _sent(candidates: list[Candidate], report: DraftReport = NO_REPORT) -> bytes:
    batch = pb.CandidateBatch()
    add_candidates(batch, candidates, report)
    return batch.SerializeToString()


@given(trees())
def test_tree_survives_the_wire(tree: TokenTree) -> None:
    sent = token_tree_pb2.TokenTree.FromString(tree_message(tree).SerializeToString())
    assert tree_from_message(sent) == tree


@given(st.lists(candidates, max_size=4))
def test_candidates_survive_the_wire(candidates: list[Candidate]) -> None:
    received = pb.CandidateBatch.FromString(_sent(candidates)).candidates
    assert [candidate_from_message(each) for each in received] == candidates


@given(st.lists(verdicts, max_size=4))
def test_verdicts_survive_the_wire(verdicts: list[Verdict]) -> None:
    batch = pb.VerdictBatch()
    add_verdicts(batch, verdicts)
    received = pb.VerdictBatch.FromString(batch.SerializeToString()).verdicts
    assert [verdict_from_message(each) for each in received] == verdicts


@given(shapes)
def test_shape_survives_the_wire(shape: TreeShape) -> None:
    assert shape_from_message(shape_message(shape)) == shape


@given(st.none() | st.integers(0, 10**9), st.none() | shapes, st.booleans())
def test_report_of_a_draft_survives_the_wire(
    draft_ns: int | None, pinned: TreeShape | None, is_warming: bool
) -> None:
    report = DraftReport(None if draft_ns is None else draft_ns / 1e9, pinned, is_warming)
    assert report_from_message(pb.CandidateBatch.FromString(_sent([], report))) == report


def test_condition_on_no_node_is_not_the_condition_on_node_0() -> None:
    tree = TokenTree.chain([1])
    sent = [Candidate(1, 1, 1, tree, Condition(node, 7)) for node in (None, 0)]
    first, second = pb.CandidateBatch.FromString(_sent(sent)).candidates
    assert candidate_from_message(first).condition == Condition(None, 7)
    assert candidate_from_message(second).condition == Condition(0, 7)


@pytest.mark.parametrize(
    "message",
    [
        token_tree_pb2.TokenTree(token_ids=[1], parent_indices=[0]),
        token_tree_pb2.TokenTree(token_ids=[1, 2], parent_indices=[1, -1]),
        token_tree_pb2.TokenTree(token_ids=[1], parent_indices=[-2]),
        token_tree_pb2.TokenTree(token_ids=[1, 2], parent_indices=[-1]),
        token_tree_pb2.TokenTree(parent_indices=[-1]),
        token_tree_pb2.TokenTree(token_ids=[1], parent_indices=[-1], log_probs=[-1, -1]),
        *(
            token_tree_pb2.TokenTree(
                token_ids=[1, 2, 3], parent_indices=[-1] * 3, log_probs=[-1.0, *bad]
            )
            for bad in ([math.nan, 0.0], [math.inf, 0.0], [-math.inf, 0.0], [math.inf, -math.inf])
        ),
    ],
)
def test_malformed_tree_is_refused(message: token_tree_pb2.TokenTree) -> None:
    with pytest.raises(InvalidArgument) as caught:
        tree_from_message(message)
    assert caught.value.reason == "TREE_MALFORMED"


def test_verdict_of_unknown_outcome_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="outcome is 0"):
        verdict_from_message(pb.Verdict(committed_token_ids=[1]))


def test_verdict_that_commits_nothing_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="at least 1 token"):
        verdict_from_message(pb.Verdict(outcome=pb.Verdict.OUTCOME_MISSED))


def test_shape_out_of_range_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="num_steps is 0"):
        shape_from_message(token_tree_pb2.TreeShape(topk=1, draft_token_count=2))
