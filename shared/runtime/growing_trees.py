"""The trees of a pass, while the device computes them and when the host reads them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor

from shared.kv.upload import uploaded_numbers
from shared.runtime.host_copy import HostCopy
from shared.runtime.tree_draft import PackedRows, PackedTrees, Part, Parts
from shared.runtime.tree_pass import TreePass
from shared.tokens import TokenTree


@dataclass(frozen=True, slots=True)
class PassTree:
    """The results of a pass for one sequence.

    Attributes:
        levels: tokens of the nodes whose rows are computed, and the places of their parents in the
            level before; level by level.
        rows: those of the root and each of these nodes.
    """

    tree: TokenTree
    levels: tuple[tuple[Sequence[int], Sequence[int]], ...]
    rows: PassRows


class PassRows:
    """The computed rows of one sequence, which the device may still be at."""

    def __init__(self, growing: GrowingTrees, place: int) -> None:
        self._growing, self._place = growing, place

    def after(self, row: int) -> tuple[tuple[int, float], ...]:
        """Returns tokens and scores after one row, best first; waits for the device. There are none
        where nobody asked for any, or the pass was given up."""
        return self._growing.choices(self._place, row)

    @staticmethod
    def states(rows: Iterable[tuple[PassRows, int]]) -> list[Tensor]:
        """Returns the states `[any, H]` that rows below some rows read, end to end in a few pieces;
        waits for nothing."""
        return [
            growing.states([(own._place, row) for own, row in group])
            for growing, group in groupby(rows, key=lambda each: each[0]._growing)
        ]


class GrowingTrees:
    """Trees that the device is at work on.

    Args:
        max_nodes: of a tree.
    """

    def __init__(self, parts: Parts, num_sequences: int, grown: TreePass, max_nodes: int) -> None:
        self._parts, self._num_sequences = parts, num_sequences
        self._pass, self._max_nodes = grown, max_nodes
        self._trees: HostCopy | None = None
        self._choices: HostCopy | None = None
        self._states: Tensor | None = None
        self._host_choices: tuple[list[list[int]], list[list[float]]] | None = None
        self._is_queued, self._num_queued = False, 0
        self._part: torch.cuda.Event | None = None

    @property
    def has_trees(self) -> bool:
        """Whether the trees are queued."""
        return self._trees is not None

    @property
    def is_half_done(self) -> bool:
        """Whether no more forwards are left than are queued."""
        return 2 * self._num_queued >= self._pass.shape.tree.num_steps

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
        """See `PassRows.after`."""
        self.queue()
        if self._choices is None:
            return ()
        if self._host_choices is None:
            numbers = self._choices.read().contiguous()
            self._host_choices = numbers.tolist(), numbers.view(torch.float32).tolist()
        (numbers_of, scores_of), width = self._host_choices, self._pass.kind.num_choices
        first, half = row * width, len(numbers_of[place]) // 2
        tokens = numbers_of[place][first : first + width]
        return tuple(zip(tokens, scores_of[place][half + first :][:width], strict=True))

    @torch.inference_mode()
    def states(self, rows: Sequence[tuple[int, int]]) -> Tensor:
        """Returns the states `[R, H]` of rows, each the place of a sequence and one of its own."""
        self.queue()
        assert self._states is not None, "the pass keeps no states, or was given up"
        num_rows = self._states.shape[1]
        index = [place * num_rows + row for place, row in rows]
        states = self._states.flatten(0, 1)
        return states.index_select(0, uploaded_numbers(index, states.device))

    @torch.inference_mode()
    def _queue_part(self) -> bool:
        if self._is_queued:
            return False
        part = next(self._parts)
        self._num_queued += 1
        self._is_queued = self._pass.ends_with(part)
        self._keep(part)
        return True

    def _keep(self, part: Part) -> None:
        match part:
            case PackedTrees():
                self._trees = HostCopy(part.numbers[: self._num_sequences])
            case PackedRows():
                self._choices = HostCopy(part.numbers[: self._num_sequences])
                if part.states is not None:
                    # The next pass writes where they are.
                    self._states = part.states[: self._num_sequences].clone()

    def _tree(self, place: int, row: list[int], scores: list[float]) -> PassTree:
        """Takes a row of `PackedTrees` apart; each number is read as what it is, `scores` being the
        same bits."""
        num_rows, topk = self._pass.shape.num_tree_rows, self._pass.shape.tree.topk
        num_beam_rows = self._pass.num_levels * topk
        tokens, parents = row[:num_rows], row[num_rows : 2 * num_rows]
        paths, beams = scores[2 * num_rows : 3 * num_rows], row[3 * num_rows :]
        levels = tuple(
            (beams[first : first + topk], beams[num_beam_rows + first :][:topk])
            for first in range(0, num_beam_rows, topk)
        )
        tree = best_tree(tokens, parents, paths, self._max_nodes)
        return PassTree(tree, levels, PassRows(self, place))


def best_tree(
    token_ids: Sequence[int], parents: Sequence[int], paths: Sequence[float], max_nodes: int
) -> TokenTree:
    """Returns the tree of the best nodes.

    Args:
        token_ids: of T rows, the root first; -1 where there is no node.
        parents: row of each row's parent.
        paths: score of the path to each row.
    """
    if len(token_ids) <= max_nodes + 1 and min(paths) > -math.inf:
        above = parents[1:]
        return TokenTree(
            tuple(token_ids[1:]),
            tuple([row - 1 if row else None for row in above]),
            tuple([path - paths[row] for path, row in zip(paths[1:], above, strict=True)]),
        )
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
