"""The work of one step: plain data, between the scheduler and the device. No torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeAlias

from services.target.sequence import Sequence
from shared.tokens import EMPTY_TREE, TokenTree

MAX_SCORED_ROWS = 256
"""Rows of a step that score prompt tokens: their logits are kept over the whole vocabulary."""


@dataclass(frozen=True, slots=True)
class ScheduledSequence:
    """One sequence's part of a step: `num_rows` tokens, then the nodes of `tree`.

    Attributes:
        start: logical KV index of the first row.
        num_rows: committed tokens, and the pending one if there is one.
        node_indices: index of each node in the tree as it was drafted; they differ from 0 … N-1
            when nodes beyond the output's end were cut.
        is_complete: whether the step computes the last token, so that the next one is drawn.
        scored: the rows, counted from 0, whose next token is of the prompt and gets a log
            probability.
    """

    sequence: Sequence
    start: int
    num_rows: int
    tree: TokenTree
    node_indices: tuple[int, ...]
    is_complete: bool
    scored: range = range(0)

    def slots(self, page_size: int) -> list[int]:
        """Returns the KV slot of each row, committed tokens first. While it has its lease only."""
        lease = self.sequence.open_lease
        return lease.slots(self.start, self.start + self.num_rows + len(self.tree), page_size)


@dataclass(frozen=True, slots=True)
class StepPlan:
    """The work of one step, and the sequences that lost their pages for it.

    Attributes:
        drawn: those of `scheduled` that draw.
    """

    scheduled: tuple[ScheduledSequence, ...]
    drawn: tuple[ScheduledSequence, ...]
    admitted: tuple[Sequence, ...]
    preempted: tuple[Sequence, ...]


@dataclass(slots=True)
class PlanInProgress:
    """A plan in the making, and the rows that it may still compute.

    Attributes:
        num_prompt_rows_left: rows of prompt chunks that the step still has room for.
        num_scored_rows_left: of these, rows that score prompt tokens.
    """

    num_prompt_rows_left: int
    num_scored_rows_left: int = MAX_SCORED_ROWS
    scheduled: list[ScheduledSequence] = field(default_factory=list)
    admitted: list[Sequence] = field(default_factory=list)
    preempted: list[Sequence] = field(default_factory=list)

    def take_rows(self, sequence: Sequence, num_left: int = 0) -> int:
        """Returns how many of its uncomputed tokens a sequence may compute; more than one is a
        prompt chunk, and leaves less room for others.

        Args:
            num_left: the last tokens, which are computed elsewhere.
        """
        num_rows = sequence.num_uncomputed - num_left
        if num_rows > 1:
            num_rows = min(num_rows, self.num_prompt_rows_left)
            if sequence.is_scoring:
                num_rows = min(num_rows, self.num_scored_rows_left)
                self.num_scored_rows_left -= num_rows
            self.num_prompt_rows_left -= num_rows
        return num_rows


def scored_rows(sequence: Sequence, start: int, num_rows: int) -> range:
    """Returns the rows whose next token is the next of the prompt to be scored, or after it."""
    end = min(start + num_rows, sequence.num_prompt_tokens - 1)
    return range(max(sequence.next_scored - 1 - start, 0), max(end - start, 0))


CutTree: TypeAlias = tuple[TokenTree, tuple[int, ...]]
"""The tree that is left and, for each of its nodes, the index in the tree as drafted."""
NO_CUT_TREE: CutTree = (EMPTY_TREE, ())


def pruned(tree: TokenTree, max_depth: int) -> CutTree:
    """Cuts nodes deeper than `max_depth`: the output or the context ends before them."""
    if not tree.token_ids:
        return tree, ()
    if len(tree) <= max_depth:
        return tree, tuple(range(len(tree)))
    depths = tree.depths
    kept = tuple(node for node, depth in enumerate(depths) if depth <= max_depth)
    if len(kept) == len(depths):
        return tree, kept
    return tree.only(kept), kept


def narrowed(tree: TokenTree, num_draft_tokens: int | None) -> CutTree:
    """Cuts a tree to the nodes that its draft believes in most, if it may not stay whole.

    The probability of a node's path decides, and between equals the depth: never what a token is,
    so that nothing about the output changes. Without probabilities the depth decides alone, as it
    must for drawn chains.

    Args:
        num_draft_tokens: rows of the tree at most, the root included; None is any number.

    Source: nodes ranked by the probability of their path, Miao et al., arXiv 2305.09781.
    """
    if num_draft_tokens is None or len(tree) < num_draft_tokens:
        return tree, tuple(range(len(tree)))
    path_log_probs, depths = _path_log_probs(tree), tree.depths
    ranked = sorted(range(len(tree)), key=lambda node: (-path_log_probs[node], depths[node]))
    kept = tuple(sorted(ranked[: num_draft_tokens - 1]))
    return tree.only(kept), kept


def _path_log_probs(tree: TokenTree) -> list[float]:
    """Returns what is never above the same of a node's parent, whatever the draft said."""
    log_probs = tree.log_probs or [0.0] * len(tree)
    found: list[float] = []
    for parent, log_prob in zip(tree.parent_indices, log_probs, strict=True):
        found.append((0.0 if parent is None else found[parent]) + min(log_prob, 0.0))
    return found
