"""Given trees as rows of a pass."""

from __future__ import annotations

from shared.runtime.tree_pass import WalkedTree, walked_shape
from shared.tokens import TokenTree, TreeShape

TREE = TokenTree(
    token_ids=(11, 12, 13, 21, 22, 31),
    parent_indices=(None, None, None, 1, 1, 4),
    log_probs=(-0.1, -2.0, -0.2, -0.3, -0.4, -0.5),
)


def test_nodes_with_children_come_before_likelier_leaves() -> None:
    walked = WalkedTree.of(TREE, 3, 2)
    assert walked.levels == (([12, 11], [0, 0]), ([22, 21], [0, 0]), ([31, 0], [0, 0]))


def test_levels_that_the_tree_does_not_fill_are_filled_up_with_rows_behind_its_own() -> None:
    walked = WalkedTree.of(TokenTree.chain([5, 6]), 3, 1)
    assert walked.levels == (([5], [0]), ([6], [0]), ([0], [0]))
    # Token, place of the parent, and the rows on the way with the own one at the end.
    assert walked.numbers().tolist() == [[5, 0, 0, 0, 0], [6, 0, 0, 1, 1], [0, 0, 0, 1, 2]]


def test_each_row_sees_the_rows_on_its_own_way() -> None:
    lines = WalkedTree.of(TREE, 3, 3).numbers()[:, 2:].tolist()
    assert [set(line) for line in lines] == [
        *({0}, {1}, {2}),
        *({0, 3}, {0, 4}, {0, 5}),
        *({0, 3, 6}, {0, 3, 7}, {0, 3, 8}),
    ]


def test_a_tree_is_walked_in_the_shape_that_is_wanted_or_in_a_larger_one() -> None:
    assert walked_shape(TREE, TreeShape(4, 3, 9)) == TreeShape(4, 3, 9)
    assert walked_shape(TREE, TreeShape(1, 1, 2)) == TreeShape(3, 1, 4)
    two_inner = TokenTree((1, 2, 3, 4), (None, None, 0, 1))
    assert walked_shape(two_inner, TreeShape(3, 1, 4)) == TreeShape(3, 2, 4)
