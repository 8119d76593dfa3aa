"""What a pass grows, while the device is at work on it and when the host reads it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from shared.runtime.host_copy import HostCopy
from shared.runtime.tree_pass import Levels, TreePass
from shared.tokens import TokenTree


@dataclass(frozen=True, slots=True)
class PassTree:
    """What a pass grew for one sequence.

    Attributes:
        levels: tokens of the nodes whose rows are computed, and the places of their parents in the
            level before; level by level.
        choices: what may follow the root and each of those nodes.
    """

    tree: TokenTree
    levels: tuple[tuple[Sequence[int], Sequence[int]], ...]
    choices: Choices


class Choices:
    """The best tokens after the rows of one sequence, which the device may still be at."""

    def __init__(self, growing: GrowingTrees, place: int) -> None:
        self._growing, self._place = growing, place

    def after(self, row: int) -> tuple[tuple[int, float], ...]:
        """Returns tokens and scores of one row, best first; waits for the device. There are none
        where nobody asked for any, or the pass was given up."""
        return self._growing.choices(self._place, row)


class GrowingTrees:
    """Trees that the device is at work on."""

    def __init__(self, levels: Levels, num_sequences: int, grown: TreePass, max_nodes: int) -> None:
        self._levels, self._num_sequences = levels, num_sequences
        self._pass, self._max_nodes = grown, max_nodes
        self._trees: HostCopy | None = None
        self._choices: HostCopy | None = None
        self._host_choices: tuple[list[list[int]], list[list[float]]] | None = None
        self._is_queued = False
        self._part: torch.cuda.Event | None = None

    @property
    def has_trees(self) -> bool:
        """Whether the trees are queued."""
        return self._trees is not None

    def advance(self) -> bool:
        """Queues a part and waits until the device is at work on it, so that another part, or
        something else, can be queued in time; returns whether some was left."""
        before, self._part = self._part, None
        is_left = self._queue_part()
        if is_left and self._pass.is_on_gpu:
            self._part = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._part.record()
        if before is not None:
            before.synchronize()
        return is_left

    def queue(self) -> None:
        """Queues all that is left; waits for nothing."""
        while self._queue_part():
            pass

    def run_on(self) -> bool:
        """Queues all that is left if that takes the host no time; returns whether some is left."""
        if self._pass.is_on_gpu:
            self.queue()
        return not self._is_queued

    def give_up(self) -> None:
        """Queues no more: another pass takes its place."""
        self._is_queued = True

    def read(self) -> list[PassTree]:
        """Waits for the trees and returns what grew for each sequence."""
        while self._trees is None and self._queue_part():
            pass
        assert self._trees is not None, "the pass was given up"
        rows = self._trees.read().contiguous()
        scores = rows.view(torch.float32).tolist()
        return [
            self._tree(place, *each)
            for place, each in enumerate(zip(rows.tolist(), scores, strict=True))
        ]

    def choices(self, place: int, row: int) -> tuple[tuple[int, float], ...]:
        """See `Choices.after`."""
        self.queue()
        if self._choices is None:
            return ()
        if self._host_choices is None:
            numbers = self._choices.read().contiguous()
            self._host_choices = numbers.tolist(), numbers.view(torch.float32).tolist()
        (numbers_of, scores_of), width = self._host_choices, self._pass.num_choices
        first, half = row * width, len(numbers_of[place]) // 2
        tokens = numbers_of[place][first : first + width]
        return tuple(zip(tokens, scores_of[place][half + first :][:width], strict=True))

    @torch.inference_mode()
    def _queue_part(self) -> bool:
        if self._is_queued:
            return False
        try:
            trees = next(self._levels)
        except StopIteration as end:
            self._is_queued = True
            if end.value is None:
                return False
            self._choices = HostCopy(end.value[: self._num_sequences])
            return True
        if trees is not None:
            self._trees = HostCopy(trees[: self._num_sequences])
        return True

    def _tree(self, place: int, row: list[int], scores: list[float]) -> PassTree:
        """Takes a row of `packed_trees` apart; each number is read as what it is, `scores` being
        the same bits."""
        num_rows, topk = self._pass.shape.num_tree_rows, self._pass.shape.tree.topk
        num_beam_rows = self._pass.num_levels * topk
        tokens, parents = row[:num_rows], row[num_rows : 2 * num_rows]
        paths, beams = scores[2 * num_rows : 3 * num_rows], row[3 * num_rows :]
        levels = tuple(
            (beams[first : first + topk], beams[num_beam_rows + first :][:topk])
            for first in range(0, num_beam_rows, topk)
        )
        tree = best_tree(tokens, parents, paths, self._max_nodes)
        return PassTree(tree, levels, Choices(self, place))


def best_tree(
    token_ids: Sequence[int], parents: Sequence[int], paths: Sequence[float], max_nodes: int
) -> TokenTree:
    """Returns the tree of the best nodes.

    Args:
        token_ids: of T rows, the root first; -1 where there is no node.
        parents: row of each row's parent.
        paths: score of the path to each row.
    """
    kept = [row for row in range(1, len(token_ids)) if paths[row] > -math.inf]
    if len(kept) > max_nodes:
        # A child's score is at most its parent's and its row comes later, so parents stay.
        kept = sorted(sorted(kept, key=lambda row: (-paths[row], row))[:max_nodes])
    nodes: dict[int, int | None] = {0: None}
    nodes.update({row: node for node, row in enumerate(kept)})
    return TokenTree(
        token_ids=tuple(token_ids[row] for row in kept),
        parent_indices=tuple(nodes[parents[row]] for row in kept),
        log_probs=tuple(paths[row] - paths[parents[row]] for row in kept),
    )
