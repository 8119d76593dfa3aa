"""The plan of one step: plain data from the scheduler to the launcher. No torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeAlias

from services.target.sequence import Sequence
from shared.tokens import EMPTY_TREE, TokenTree

MAX_SCORED_ROWS = 256
"""Most rows of a step that score prompt tokens: each keeps logits over the whole vocabulary."""


@dataclass(frozen=True, slots=True)
class ScheduledSequence:
    """One sequence's part of a step: `num_rows` tokens, then the nodes of `tree`.

    Attributes:
        start: logical KV index of the first row.
        num_rows: number of committed tokens, and of the pending one if there is one.
        node_indices: index of each node in the tree as it was drafted. They differ from 0 … N-1 if
            nodes beyond the output's end were cut.
        is_complete: whether the step computes the last token, so that the next one is drawn.
        scored: rows, counted from 0, whose next token is a prompt token to be scored.
    """

    sequence: Sequence
    start: int
    num_rows: int
    tree: TokenTree
    node_indices: tuple[int, ...]
    is_complete: bool
    scored: range = range(0)

    def slots(self, page_size: int) -> list[int]:
        """Returns the KV slot of each row, committed tokens first; requires a lease."""
        lease = self.sequence.open_lease
        return lease.slots(self.start, self.start + self.num_rows + len(self.tree), page_size)


@dataclass(slots=True)
class StepPlan:
    """The sequences of one step, and the sequences that lost their pages for it. The scheduler adds
    to it until the rows are used up.

    Attributes:
        drawn: the scheduled sequences that draw.
        num_prompt_rows_left: rows of prompt chunks that the step may still compute.
        num_scored_rows_left: rows among them that may score prompt tokens.
    """

    num_prompt_rows_left: int
    num_scored_rows_left: int = MAX_SCORED_ROWS
    scheduled: list[ScheduledSequence] = field(default_factory=list)
    drawn: list[ScheduledSequence] = field(default_factory=list)
    admitted: list[Sequence] = field(default_factory=list)
    preempted: list[Sequence] = field(default_factory=list)

    def take_rows(self, sequence: Sequence, num_left: int = 0) -> int:
        """Returns how many of its uncomputed tokens a sequence may compute. More than one token is
        a prompt chunk, which counts towards the limits.

        Args:
            num_left: number of last tokens that a lane computes instead.
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
    """Returns the rows whose next token is a prompt token at `next_scored` or behind it."""
    end = min(start + num_rows, sequence.num_prompt_tokens - 1)
    return range(max(sequence.next_scored - 1 - start, 0), max(end - start, 0))


CutTree: TypeAlias = tuple[TokenTree, tuple[int, ...]]
"""The remaining tree and, for each of its nodes, the index in the tree as drafted."""
NO_CUT_TREE: CutTree = (EMPTY_TREE, ())


def pruned(tree: TokenTree, max_depth: int) -> CutTree:
    """Cuts the nodes deeper than `max_depth`, where the output or the context ends."""
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
    """Cuts a tree that has too many nodes to those most probable according to its draft.

    Nodes are ranked by the probability of their path, then by depth; never by their token, so that
    the output does not change. Without probabilities depth alone counts, as drawn chains need.

    Args:
        num_draft_tokens: most rows of the tree, root included; None allows any number.

    Source: nodes ranked by the probability of their path, Miao et al., arXiv 2305.09781.
    """
    if num_draft_tokens is None or len(tree) < num_draft_tokens:
        return tree, tuple(range(len(tree)))
    path_log_probs, depths = _path_log_probs(tree), tree.depths
    ranked = sorted(range(len(tree)), key=lambda node: (-path_log_probs[node], depths[node]))
    kept = tuple(sorted(ranked[: num_draft_tokens - 1]))
    return tree.only(kept), kept


def _path_log_probs(tree: TokenTree) -> list[float]:
    """Returns the log probability of each node's path; never above that of its parent's path, even
    if the draft sent a positive log probability."""
    log_probs = tree.log_probs or [0.0] * len(tree)
    path_log_probs: list[float] = []
    for parent, log_prob in zip(tree.parent_indices, log_probs, strict=True):
        parent_log_prob = 0.0 if parent is None else path_log_probs[parent]
        path_log_probs.append(parent_log_prob + min(log_prob, 0.0))
    return path_log_probs
