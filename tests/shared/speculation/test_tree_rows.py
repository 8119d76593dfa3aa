"""Trees of a batch on the device against the functions for one tree on the host."""

from __future__ import annotations

import random

import pytest
import torch

from shared.speculation.growth import SelectedNodes
from shared.speculation.tree import row_depths, row_parents, tail_mask
from shared.speculation.tree_rows import TreeRows, accept_rows, tree_rows
from shared.speculation.verify import accept_path
from shared.tokens import TokenTree

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


def _selected(source: random.Random, trees: list[TokenTree]) -> SelectedNodes:
    """Returns the trees as growth leaves them: candidates with gaps, and -inf after the nodes."""
    candidates = [sorted(source.sample(range(40), NUM_NODES)) for _ in trees]
    tokens, parents, path = [], [], []
    for own, tree in zip(candidates, trees, strict=True):
        num_missing = NUM_NODES - len(tree)
        tokens.append([*tree.token_ids, *[3] * num_missing])
        parents.append([0 if p is None else own[p] + 1 for p in tree.parent_indices])
        parents[-1] += [own[0] + 1] * num_missing
        path.append([-1.0] * len(tree) + [-torch.inf] * num_missing)
    scores = torch.tensor(path)
    return SelectedNodes(
        torch.tensor(candidates), torch.tensor(tokens), torch.tensor(parents), scores, scores
    )


@pytest.fixture
def trees() -> list[TokenTree]:
    source = random.Random(1)
    return [_random_tree(source, count) for count in (NUM_NODES, NUM_NODES, 7, 1, 0, 10)]


@pytest.fixture
def rows(trees: list[TokenTree]) -> TreeRows:
    roots = torch.arange(len(trees))
    return tree_rows(_selected(random.Random(2), trees), roots, MAX_DEPTH)


def test_rows_stand_where_the_host_puts_them(trees: list[TokenTree], rows: TreeRows) -> None:
    assert rows.num_nodes.tolist() == [len(tree) for tree in trees]
    for index, tree in enumerate(trees):
        count = len(tree) + 1
        assert rows.token_ids[index, :count].tolist() == [index, *tree.token_ids]
        assert rows.token_ids[index, count:].eq(-1).all()
        assert rows.parents[index, 1:count].tolist() == list(row_parents(tree)[1:])
        assert rows.depths[index, :count].tolist() == list(row_depths(tree))
        visible = rows.visible[index, :count, :count]
        assert visible.tolist() == [list(row) for row in tail_mask(tree)]
        assert not rows.visible[index, :count, count:].any()


def test_paths_are_those_of_the_host(trees: list[TokenTree], rows: TreeRows) -> None:
    lengths = set()
    for seed in range(200):
        generator = torch.Generator().manual_seed(seed)
        drawn = torch.randint(VOCAB_SIZE, rows.token_ids.shape, generator=generator)
        accepted = accept_rows(rows, drawn, MAX_DEPTH)
        for index, tree in enumerate(trees):
            path = accept_path(tree, drawn[index, : len(tree) + 1].tolist())
            count = len(path.node_indices)
            assert accepted.counts[index] == count
            own = [0, *(node + 1 for node in path.node_indices)]
            assert accepted.rows[index].tolist() == [*own, *range(count + 1, MAX_DEPTH + 1)]
            tokens = accepted.token_ids[index]
            assert tuple(tokens[: count + 1].tolist()) == path.token_ids(tree)
            assert tokens[count + 1 :].eq(0).all()
            lengths.add(count)
    assert lengths == set(range(MAX_DEPTH + 1))
