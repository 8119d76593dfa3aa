"""Grows the trees of a batch with one copy to the host, for a draft apart from its target.

A head's pass is the first part of a round on the device, see `RoundDraft`. Its shape is fixed by
depth and width; of the nodes a little more are kept than are asked for, so that few graphs serve
all sizes of trees, and the host takes the best of them.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from shared.runtime.lockstep import TreeLeader
from shared.runtime.round_batches import RoundShape
from shared.runtime.round_state import RoundSampling
from shared.runtime.tree_draft import Parts, RequestScores
from shared.runtime.tree_model import PassKind, TreeModel
from shared.runtime.tree_pass import (
    GrowingTrees,
    OpenSequence,
    PassLimits,
    PassRows,
    PassTree,
    TreePass,
    WalkedTree,
)
from shared.tokens import TokenTree, TreeShape

# Most passes whose graphs are kept: a few of each shape.
_MAX_PASSES = 24
_ROW_BUCKETS = (8, 16, 32, 64)
_CHOICE_BUCKETS = (4, 8, 16, 32, 64)


class TreeGrower:
    """Passes of one model for trees of any shape, one at a time. Owned by one thread.

    Args:
        leader: tells the other processes of the model's group, on rank 0.
        is_split: see `PassKind`.
    """

    def __init__(
        self,
        model: TreeModel,
        limits: PassLimits,
        *,
        is_split: bool = False,
        leader: TreeLeader | None = None,
    ) -> None:
        assert model.pool.device.type == "cuda" or not limits.has_graphs, "graphs need CUDA"
        self.model, self.limits, self._is_split = model, limits, is_split
        self._leader = leader
        self._kinds: dict[RoundSampling, None] = {}
        self._memory = torch.cuda.graph_pool_handle() if limits.has_graphs else None
        self._passes: OrderedDict[tuple[TreeShape, PassKind], TreePass] = OrderedDict()

    def max_open_rows(self, tree: TreeShape) -> int:
        """Returns most open rows of a sequence that a pass of this shape takes."""
        return 1 if self._is_split else tree.num_steps + 1

    def split(self) -> TreeGrower:
        """Returns a grower of the same trees behind one open row, whose passes can stop. It has
        memory of its own, so that passes of this one can be run meanwhile."""
        leader = None if self._leader is None else self._leader.split()
        other = TreeGrower(self.model, self.limits, is_split=True, leader=leader)
        other._kinds = self._kinds
        return other

    def begin(
        self,
        sequences: Sequence[OpenSequence],
        sources: Sequence[Tensor],
        tree: TreeShape,
        *,
        num_choices: int = 0,
        is_walk: bool = False,
        scores: RequestScores | None = None,
    ) -> GrowingTrees:
        """Begins to grow a tree for each sequence; waits for nothing, unless the number of
        sequences, their kind of sampling or the shape is new to the device.

        Args:
            sequences: at most `max_sequences`.
            sources: see `TreePass.begin`.
            tree: without levels and children that could not be kept.
            num_choices: how many tokens to find after each computed row, see `TreeDraft`; a few
                more may be found.
            is_walk: the trees are those of the sequences; see `walk`.
            scores: of requests that ask for more than `OpenSequence.sampling` says.
        """
        if self._leader is not None:
            assert not sources, "only what the host has is announced"
            self._leader.call(
                TreeGrower.begin_parts,
                tuple(sequences),
                (),
                tree,
                num_choices=num_choices,
                is_walk=is_walk,
                scores=scores,
            )
        parts = self.begin_parts(
            sequences, sources, tree, num_choices=num_choices, is_walk=is_walk, scores=scores
        )
        if self._leader is not None:
            parts = self._leader.announced(parts)
        chosen = self._pass_of(tree, num_choices, is_walk=is_walk, is_plain=scores is not None)
        return GrowingTrees(parts, len(sequences), chosen, tree.max_node_count)

    def begin_parts(
        self,
        sequences: Sequence[OpenSequence],
        sources: Sequence[Tensor],
        tree: TreeShape,
        *,
        num_choices: int,
        is_walk: bool = False,
        scores: RequestScores | None = None,
    ) -> Parts:
        """Does what `begin` does where nobody reads the trees."""
        if scores is None:
            self._meet(RoundSampling.of(each.sampling for each in sequences))
        chosen = self._pass_of(tree, num_choices, is_walk=is_walk, is_plain=scores is not None)
        return chosen.begin(sequences, sources, scores)

    def walk(
        self,
        sequences: Sequence[OpenSequence],
        sources: Sequence[Tensor],
        trees: Sequence[TokenTree],
        shape: TreeShape,
        *,
        num_choices: int,
    ) -> list[PassTree]:
        """Queues the computation of a given tree behind each sequence; see `begin`.

        Args:
            shape: all trees are within its `walked_shape`.
        """
        size = self._pass_of(shape, num_choices, is_walk=True).shape.tree
        walks = [WalkedTree.of(each, size.num_steps, size.topk) for each in trees]
        rows = [replace(each, walk=walk) for each, walk in zip(sequences, walks, strict=True)]
        growing = self.begin(rows, sources, shape, num_choices=num_choices, is_walk=True)
        growing.queue()
        return [
            PassTree(walk.tree, walk.levels, PassRows(growing, place))
            for place, walk in enumerate(walks)
        ]

    def capture_next(
        self,
        tree: TreeShape,
        *,
        num_choices: int = 0,
        is_walk: bool = False,
        num_sequences: int | None = None,
    ) -> bool:
        """Captures one graph that batches of a shape may want; returns whether one was left. A
        launch that comes before its graph captures it.

        Args:
            num_sequences: only what `is_ready` asks for; None is any number, and every kind of
                sampling met so far.
        """
        if not (self._kinds and self.limits.has_graphs):
            return False
        if self._leader is not None:
            self._leader.call(
                TreeGrower.capture_next,
                tree,
                num_choices=num_choices,
                is_walk=is_walk,
                num_sequences=num_sequences,
            )
        chosen = self._pass_of(tree, num_choices, is_walk=is_walk)
        if num_sequences is None:
            return chosen.capture_first(chosen.left_of(self._kinds))
        return chosen.capture_first(chosen.left_for(num_sequences, self._last_kind))

    def is_ready(
        self, tree: TreeShape, num_sequences: int, *, num_choices: int = 0, is_walk: bool = False
    ) -> bool:
        """Whether passes of so many sequences, or fewer, have all their graphs, for the kind of
        sampling that was met last."""
        if not (self._kinds and self.limits.has_graphs):
            return True
        grown = self._passes.get(self._key(tree, num_choices, is_walk=is_walk))
        return grown is not None and not grown.left_for(num_sequences, self._last_kind)

    @property
    def _last_kind(self) -> RoundSampling:
        return next(reversed(self._kinds))

    def _meet(self, kind: RoundSampling) -> None:
        """The kind that was met last stands last."""
        if not self._kinds or self._last_kind is not kind:
            self._kinds.pop(kind, None)
            self._kinds[kind] = None

    def _pass_of(
        self, tree: TreeShape, num_choices: int, *, is_walk: bool = False, is_plain: bool = False
    ) -> TreePass:
        key = self._key(tree, num_choices, is_walk=is_walk, is_plain=is_plain)
        if is_plain:  # it holds nothing that others would have to make way for
            return self._new_pass(*key)
        if key not in self._passes:
            self._passes[key] = self._new_pass(*key)
        self._passes.move_to_end(key)
        if len(self._passes) > _MAX_PASSES:
            _, forgotten = self._passes.popitem(last=False)
            forgotten.release()
        return self._passes[key]

    def _key(
        self, tree: TreeShape, num_choices: int, *, is_walk: bool, is_plain: bool = False
    ) -> tuple[TreeShape, PassKind]:
        num_found = self._num_found(tree, num_choices)
        return _common_shape(tree), PassKind(num_found, self._is_split, is_walk, is_plain)

    def _num_found(self, tree: TreeShape, num_choices: int) -> int:
        """Returns how many tokens a pass looks for: few graphs serve any number."""
        if not num_choices:
            return 0
        wanted = max(num_choices, tree.topk)
        sizes = (size for size in _CHOICE_BUCKETS if size >= wanted)
        return min(next(sizes, wanted), self.model.vocab_size)

    def _new_pass(self, tree: TreeShape, kind: PassKind) -> TreePass:
        # Leaves are computed where choices are wanted.
        num_leaves = tree.topk if kind.num_choices else 0
        shape = RoundShape.of(
            tree,
            draft_vocab_size=self.model.vocab_size,
            max_context_tokens=self.limits.max_context_tokens + num_leaves,
        )
        return TreePass(self.model, shape, self.limits, kind, memory=self._memory)


def _common_shape(tree: TreeShape) -> TreeShape:
    """Returns the shape that trees of this depth and width are grown in."""
    if tree.topk == 1:
        return replace(tree, num_draft_tokens=tree.num_steps + 1)
    rows = next((size for size in _ROW_BUCKETS if size >= tree.num_draft_tokens), None)
    return replace(tree, num_draft_tokens=rows or tree.num_draft_tokens)
