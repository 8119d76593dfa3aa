"""Rows, masks and paths of trees, against walks up from each node.

Trees of a batch on the device are held against the functions for one tree on the host."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from services.target.token_masks import RowMasks
from shared.speculation.tree import (
    NO_TOKEN,
    SelectedNodes,
    TreeRows,
    accept_rows,
    row_parents,
    row_paths,
    tree_rows,
)
from shared.speculation.verify import accept_path
from shared.tokens import EMPTY_TREE, TokenTree
from tests.helpers.host_rounds import tail_mask


@st.composite
def trees(draw: st.DrawFn) -> TokenTree:
    size = draw(st.integers(0, 12))
    parents = [
        None if node == 0 else draw(st.one_of(st.none(), st.integers(0, node - 1)))
        for node in range(size)
    ]
    tokens = draw(st.lists(st.integers(0, 5), min_size=size, max_size=size))
    return TokenTree(tuple(tokens), tuple(parents))


@given(trees())
def test_a_row_sees_the_root_its_ancestors_and_itself(tree: TokenTree) -> None:
    mask = tail_mask(tree)
    assert mask[0] == (True, *[False] * len(tree))
    for node in range(len(tree)):
        visible = {0, *(ancestor + 1 for ancestor in tree.path(node))}
        assert {row for row, seen in enumerate(mask[node + 1]) if seen} == visible


@given(trees())
def test_rows_follow_their_parents_in_depth_and_path(tree: TokenTree) -> None:
    assert list(tree.depths) == [len(tree.path(node)) for node in range(len(tree))]
    assert row_paths(tree)[0] == ()
    for row, parent in enumerate(row_parents(tree)):
        if parent is not None:
            assert parent < row
            assert row_paths(tree)[row] == (*row_paths(tree)[parent], tree.token_ids[row - 1])


def test_an_empty_tree_has_the_root_row_alone() -> None:
    assert tail_mask(EMPTY_TREE) == ((True,),)
    assert row_paths(EMPTY_TREE) == ((),)


def test_what_hangs_off_a_path_is_a_tree_of_its_own() -> None:
    tree = TokenTree((5, 6, 7, 8, 7, 9), (None, None, 0, 2, 1, 3), (0.1, 0.2, 0.3, 0.4, 0.5, 0.6))
    assert tree.below((5,)) == TokenTree((7, 8, 9), (None, 0, 1), (0.3, 0.4, 0.6))
    assert tree.below((6,)) == TokenTree((7,), (None,), (0.5,))
    assert tree.below((5, 7, 8)) == TokenTree((9,), (None,), (0.6,))
    assert tree.below(()) == tree
    for path in ((7,), (5, 8), (6, 7), (5, 7, 8, 9), (5, 7, 8, 9, 1)):
        assert tree.below(path) == EMPTY_TREE


NUM_NODES = 12
MAX_DEPTH = 4
VOCAB_SIZE = 6


def _random_tree(source: random.Random, num_nodes: int) -> TokenTree:
    """Returns a tree whose siblings hold different tokens."""
    tokens: list[int] = []
    parents: list[int | None] = []
    depths: list[int] = []
    while len(tokens) < num_nodes:
        parent = source.choice([None, *(n for n, depth in enumerate(depths) if depth < MAX_DEPTH)])
        token = source.randrange(VOCAB_SIZE)
        if (parent, token) not in zip(parents, tokens, strict=True):
            tokens.append(token)
            parents.append(parent)
            depths.append(1 if parent is None else depths[parent] + 1)
    return TokenTree(tuple(tokens), tuple(parents))


def _selected(source: random.Random, row_trees: list[TokenTree]) -> SelectedNodes:
    """Returns trees as growth leaves them: candidates with gaps, and -inf after the nodes."""
    candidates = [sorted(source.sample(range(40), NUM_NODES)) for _ in row_trees]
    tokens, parents, path = [], [], []
    for own, tree in zip(candidates, row_trees, strict=True):
        num_missing = NUM_NODES - len(tree)
        tokens.append([*tree.token_ids, *[3] * num_missing])
        parents.append([0 if p is None else own[p] + 1 for p in tree.parent_indices])
        parents[-1] += [own[0] + 1] * num_missing
        path.append([-1.0] * len(tree) + [-torch.inf] * num_missing)
    return SelectedNodes(*map(torch.tensor, (candidates, tokens, parents, path)))


@pytest.fixture
def row_trees() -> list[TokenTree]:
    source = random.Random(1)
    return [_random_tree(source, count) for count in (NUM_NODES, NUM_NODES, 7, 1, 0, 10)]


@pytest.fixture
def rows(row_trees: list[TokenTree]) -> TreeRows:
    roots = torch.arange(len(row_trees))
    return tree_rows(_selected(random.Random(2), row_trees), roots, MAX_DEPTH)


def test_rows_stand_where_the_host_puts_them(row_trees: list[TokenTree], rows: TreeRows) -> None:
    assert rows.num_nodes.tolist() == [len(tree) for tree in row_trees]
    for index, tree in enumerate(row_trees):
        count = len(tree) + 1
        assert rows.token_ids[index, :count].tolist() == [index, *tree.token_ids]
        assert rows.token_ids[index, count:].eq(-1).all()
        assert rows.parents[index, 1:count].tolist() == list(row_parents(tree)[1:])
        assert rows.depths[index, :count].tolist() == [0, *tree.depths]
        visible = rows.visible[index, :count, :count]
        assert visible.tolist() == [list(row) for row in tail_mask(tree)]
        assert not rows.visible[index, :count, count:].any()


def test_paths_are_those_of_the_host(row_trees: list[TokenTree], rows: TreeRows) -> None:
    """Some rows may not draw, which ends a path before their nodes."""
    lengths, num_cut = set(), 0
    for seed in range(200):
        generator = torch.Generator().manual_seed(seed)
        drawn = torch.randint(VOCAB_SIZE, rows.token_ids.shape, generator=generator)
        may_draw = torch.rand(drawn.shape, generator=generator) < 0.9
        may_draw[:, 0] = True
        accepted = accept_rows(rows, torch.where(may_draw, drawn, NO_TOKEN), MAX_DEPTH)
        for index, tree in enumerate(row_trees):
            whole = accept_path(tree, drawn[index, : len(tree) + 1].tolist())
            masks = RowMasks(torch.empty(0), torch.empty(0), may_draw[index].numpy())
            path = masks.cut(whole, tree, 0)
            num_cut += path != whole
            count = len(path.node_indices)
            assert accepted.counts[index] == count
            own = [0, *(node + 1 for node in path.node_indices)]
            assert accepted.rows[index].tolist() == [*own, *range(count + 1, MAX_DEPTH + 1)]
            tokens = accepted.token_ids[index]
            assert tuple(tokens[: count + 1].tolist()) == path.token_ids(tree)
            assert tokens[count + 1 :].eq(0).all()
            lengths.add(count)
    assert lengths == set(range(MAX_DEPTH + 1))
    assert num_cut > 20
