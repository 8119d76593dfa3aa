"""Layout of the rows of a token tree: row 0 is the root, row i + 1 is node i.

The root is the last committed token, whose KV is computed in the same forward as the nodes'.
"""

from __future__ import annotations

from collections.abc import Collection

from shared.tokens import StopParams, TokenTree


def row_parents(tree: TokenTree) -> tuple[int | None, ...]:
    """Returns the row of each row's parent; None for the root."""
    return (None, *(0 if parent is None else parent + 1 for parent in tree.parent_indices))


def row_depths(tree: TokenTree) -> tuple[int, ...]:
    """Returns each row's distance from the root."""
    return (0, *tree.depths)


def row_positions(tree: TokenTree, *, root_position: int) -> tuple[int, ...]:
    """Returns each row's absolute position; siblings share one."""
    return tuple(root_position + depth for depth in row_depths(tree))


def drawn_positions(tree: TokenTree, *, root_position: int) -> tuple[int, ...]:
    """Returns the absolute position of the token each row draws: one past the row's own.

    This is the position that keys the noise.
    """
    return tuple(position + 1 for position in row_positions(tree, root_position=root_position))


def tail_mask(tree: TokenTree) -> tuple[tuple[bool, ...], ...]:
    """Returns what each row sees of the rows: the root, its ancestors and itself.

    Square, and lower triangular because parents come first; it is `SequenceRows.tail_mask` of a
    tree whose prefix ends before the root.
    """
    parents = row_parents(tree)
    mask: list[list[bool]] = []
    for row, parent in enumerate(parents):
        seen = [False] * len(parents) if parent is None else list(mask[parent])
        seen[row] = True
        mask.append(seen)
    return tuple(tuple(seen) for seen in mask)


def row_paths(tree: TokenTree) -> tuple[tuple[int, ...], ...]:
    """Returns the token ids from the root's child down to each row; empty for the root."""
    paths: list[tuple[int, ...]] = [()]
    for token_id, parent in zip(tree.token_ids, row_parents(tree)[1:], strict=True):
        assert parent is not None
        paths.append((*paths[parent], token_id))
    return tuple(paths)


def banned_by_min_tokens(
    tree: TokenTree, stop: StopParams, *, num_output_tokens: int, eos_token_ids: Collection[int]
) -> tuple[tuple[int, ...], ...]:
    """Returns the tokens that each row must not draw because they would end the output too early.

    Args:
        tree: the candidate; an empty tree for a plain row.
        stop: its stop tokens, and the model's own end tokens unless they are ignored.
        num_output_tokens: committed so far, the root included when it is an output token.
        eos_token_ids: the model's own end tokens.
    """
    ending = set(stop.stop_token_ids) | (set() if stop.ignore_eos else set(eos_token_ids))
    banned = tuple(sorted(ending))
    return tuple(
        banned if num_output_tokens + depth < stop.min_output_tokens else ()
        for depth in row_depths(tree)
    )
