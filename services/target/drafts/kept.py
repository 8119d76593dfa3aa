"""The part of a drafted tree that is verified. No torch."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

from shared.tokens import TokenTree


@dataclass(frozen=True, slots=True)
class Kept:
    """Part of a tree, and the index of each of its nodes in the whole."""

    tree: TokenTree
    nodes: tuple[int, ...]

    @classmethod
    def of(cls, tree: TokenTree, nodes: SequenceOf[int]) -> Kept:
        """Keeps some nodes, ascending; a node's parent must be among them."""
        return cls(tree.only(nodes), tuple(nodes))


def narrowed(tree: TokenTree, num_draft_tokens: int | None) -> Kept | None:
    """Cuts a tree to the nodes that its draft believes in most; None where it may stay whole.

    The probability of a node's path decides, and between equals the depth: never what a token is,
    so that nothing about the output changes. Without probabilities the depth decides alone, as it
    must for drawn chains.

    Args:
        num_draft_tokens: rows of the tree at most, the root included; None is any number.

    Source: nodes ranked by the probability of their path, Miao et al., arXiv 2305.09781.
    """
    if num_draft_tokens is None or len(tree) < num_draft_tokens:
        return None
    path_log_probs, depths = _path_log_probs(tree), tree.depths
    ranked = sorted(range(len(tree)), key=lambda node: (-path_log_probs[node], depths[node]))
    return Kept.of(tree, sorted(ranked[: num_draft_tokens - 1]))


def _path_log_probs(tree: TokenTree) -> list[float]:
    """Returns what is never above the same of a node's parent, whatever the draft said."""
    log_probs = tree.log_probs or [0.0] * len(tree)
    found: list[float] = []
    for parent, log_prob in zip(tree.parent_indices, log_probs, strict=True):
        found.append((0.0 if parent is None else found[parent]) + min(log_prob, 0.0))
    return found
