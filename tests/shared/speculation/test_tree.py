"""Rows, positions, masks and paths of trees, against walks up from each node."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from shared.speculation.tree import (
    banned_by_min_tokens,
    drawn_positions,
    row_depths,
    row_parents,
    row_paths,
    row_positions,
    tail_mask,
)
from shared.tokens import EMPTY_TREE, StopParams, TokenTree


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
@settings(deadline=None)
def test_a_row_sees_the_root_its_ancestors_and_itself(tree: TokenTree) -> None:
    mask = tail_mask(tree)
    assert mask[0] == (True, *[False] * len(tree))
    for node in range(len(tree)):
        visible = {0, *(ancestor + 1 for ancestor in tree.path(node))}
        assert {row for row, seen in enumerate(mask[node + 1]) if seen} == visible


@given(trees())
@settings(deadline=None)
def test_rows_follow_their_parents_in_depth_position_and_path(tree: TokenTree) -> None:
    depths = [0, *(len(tree.path(node)) for node in range(len(tree)))]
    assert list(row_depths(tree)) == depths
    assert list(row_positions(tree, root_position=40)) == [40 + d for d in depths]
    assert list(drawn_positions(tree, root_position=40)) == [41 + d for d in depths]
    assert row_paths(tree)[0] == ()
    for row, parent in enumerate(row_parents(tree)):
        if parent is not None:
            assert parent < row
            assert row_paths(tree)[row] == (*row_paths(tree)[parent], tree.token_ids[row - 1])


def test_an_empty_tree_has_the_root_row_alone() -> None:
    assert tail_mask(EMPTY_TREE) == ((True,),)
    assert row_positions(EMPTY_TREE, root_position=9) == (9,)
    assert row_paths(EMPTY_TREE) == ((),)


def test_end_tokens_are_banned_only_at_rows_before_the_minimum() -> None:
    tree = TokenTree((1, 2, 3), (None, 0, None))
    stop = StopParams(max_output_tokens=9, min_output_tokens=5, stop_token_ids=frozenset({7}))
    # The root draws output token 4 and depth 1 token 5; depth 2 draws with five tokens out.
    banned = banned_by_min_tokens(tree, stop, num_output_tokens=3, eos_token_ids=(8, 6))
    assert banned == ((6, 7, 8), (6, 7, 8), (), (6, 7, 8))


def test_ignored_end_tokens_are_not_banned() -> None:
    stop = StopParams(
        max_output_tokens=9, min_output_tokens=5, stop_token_ids=frozenset({7}), ignore_eos=True
    )
    banned = banned_by_min_tokens(EMPTY_TREE, stop, num_output_tokens=0, eos_token_ids=(8,))
    assert banned == ((7,),)


def test_what_hangs_off_a_path_is_a_tree_of_its_own() -> None:
    tree = TokenTree((5, 6, 7, 8, 7, 9), (None, None, 0, 2, 1, 3), (0.1, 0.2, 0.3, 0.4, 0.5, 0.6))
    assert tree.below((5,)) == TokenTree((7, 8, 9), (None, 0, 1), (0.3, 0.4, 0.6))
    assert tree.below((6,)) == TokenTree((7,), (None,), (0.5,))
    assert tree.below((5, 7, 8)) == TokenTree((9,), (None,), (0.6,))
    assert tree.below(()) == tree
    for path in ((7,), (5, 8), (6, 7), (5, 7, 8, 9), (5, 7, 8, 9, 1)):
        assert tree.below(path) == EMPTY_TREE
