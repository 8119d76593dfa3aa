"""Hypothesis strategies for trees, candidates and verdicts, for tests of their wire form."""

from __future__ import annotations

from hypothesis import strategies as st

from shared.tokens import (
    NO_TREE,
    Candidate,
    Condition,
    Outcome,
    TokenTree,
    TreeRequest,
    TreeShape,
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


ids = st.none() | st.integers(1, 2**63 - 1)
conditions = st.none() | st.builds(Condition, st.none() | int31, int31, ids)
indices = st.lists(int31, max_size=5).map(tuple)
tokens = st.lists(int31, min_size=1, max_size=5).map(tuple)
shapes = st.builds(TreeShape, st.integers(1, 32), st.integers(1, 16), st.integers(2, 257))
candidates = st.builds(Candidate, int63, int63, int31, trees(), conditions, ids, st.none() | shapes)
tree_requests = st.just(NO_TREE) | st.builds(
    TreeRequest, st.none() | shapes, num_outcomes=st.none() | st.integers(0, 64)
)
verdicts = st.builds(
    Verdict,
    int63,
    int63,
    st.sampled_from(Outcome),
    indices,
    tokens,
    int31,
    tree_requests,
    ids,
    ids,
)
