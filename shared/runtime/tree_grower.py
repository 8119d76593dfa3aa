"""Grows the trees of a batch with one copy to the host, for a draft in a process of its own.

A head's pass is the first part of a round on the device, see `RoundDraft`. Depth and width fix its
shape. The pass keeps a few more nodes than requested, so that few graphs serve all tree sizes, and
the host takes the best of them.
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

# Most passes whose graphs are kept, for a few kinds of each shape.
_MAX_PASSES = 24
_ROW_BUCKETS = (8, 16, 32, 64)
_CHOICE_BUCKETS = (4, 8, 16, 32, 64)


class TreeGrower:
    """Passes of one model for trees of any shape, one at a time. Owned by one thread.

    Args:
        leader: on rank 0 of the model's group, announces passes to the other ranks.
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
        """Returns the most open rows of a sequence that a pass of this shape takes."""
        return 1 if self._is_split else tree.num_steps + 1

    def split(self) -> TreeGrower:
        """Returns a grower of the same trees behind one open row, whose passes can stop. It has its
        own graph memory, so passes of both growers can run at the same time."""
        leader = None if self._leader is None else self._leader.split()
        grower = TreeGrower(self.model, self.limits, is_split=True, leader=leader)
        grower._kinds = self._kinds
        return grower

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
        """Begins to grow a tree for each sequence. Waits for nothing, unless a new number of
        sequences, kind of sampling or shape needs a new graph.

        Args:
            sequences: at most `max_sequences`.
            sources: see `TreePass.begin`.
            tree: shape without levels and children that no tree could keep.
            num_choices: how many tokens to find after each computed row, see `TreeDraft`; the pass
                may find a few more.
            is_walk: whether to compute the given trees of the sequences; see `walk`.
            scores: scores of requests with more parameters than `OpenSequence.sampling` has.
        """
        if self._leader is not None:
            assert not sources, "source rows on the device cannot be announced"
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
        """Begins a pass without reading its trees, as followers of rank 0 do; see `begin`."""
        if scores is None:
            # The kind of sampling seen last is the last one.
            kind = RoundSampling.of(sequence.sampling for sequence in sequences)
            self._kinds.pop(kind, None)
            self._kinds[kind] = None
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
            shape: holds all trees, see `walked_shape`.
        """
        size = self._pass_of(shape, num_choices, is_walk=True).shape.tree
        walks = [WalkedTree.of(tree, size.num_steps, size.topk) for tree in trees]
        walked = [replace(own, walk=walk) for own, walk in zip(sequences, walks, strict=True)]
        growing = self.begin(walked, sources, shape, num_choices=num_choices, is_walk=True)
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
        """Captures one graph that batches of a shape may need; returns whether one was left. A
        launch that needs a graph earlier captures it itself.

        Args:
            num_sequences: captures only the graphs that `is_ready` checks; None captures those for
                any number and for every kind of sampling seen so far.
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
            return chosen.capture_first(chosen.uncaptured(self._kinds))
        return chosen.capture_first(chosen.uncaptured_for(num_sequences, self._last_kind))

    def is_ready(
        self, tree: TreeShape, num_sequences: int, *, num_choices: int = 0, is_walk: bool = False
    ) -> bool:
        """Whether passes of up to `num_sequences` have all their graphs, for the kind of sampling
        seen last."""
        if not (self._kinds and self.limits.has_graphs):
            return True
        grown = self._passes.get(self._key(tree, num_choices, is_walk=is_walk))
        return grown is not None and not grown.uncaptured_for(num_sequences, self._last_kind)

    @property
    def _last_kind(self) -> RoundSampling:
        return next(reversed(self._kinds))

    def _pass_of(
        self, tree: TreeShape, num_choices: int, *, is_walk: bool = False, is_plain: bool = False
    ) -> TreePass:
        key = self._key(tree, num_choices, is_walk=is_walk, is_plain=is_plain)
        if is_plain:  # holds no graphs, so there is nothing to keep
            return self._new_pass(*key)
        if key not in self._passes:
            self._passes[key] = self._new_pass(*key)
        self._passes.move_to_end(key)
        if len(self._passes) > _MAX_PASSES:
            _, oldest = self._passes.popitem(last=False)
            oldest.release()
        return self._passes[key]

    def _key(
        self, tree: TreeShape, num_choices: int, *, is_walk: bool, is_plain: bool = False
    ) -> tuple[TreeShape, PassKind]:
        width = 0
        if num_choices:  # rounded up, so that few graphs are needed
            wanted = max(num_choices, tree.topk)
            sizes = (size for size in _CHOICE_BUCKETS if size >= wanted)
            width = min(next(sizes, wanted), self.model.vocab_size)
        return _common_shape(tree), PassKind(width, self._is_split, is_walk, is_plain)

    def _new_pass(self, tree: TreeShape, kind: PassKind) -> TreePass:
        # Passes with choices compute the leaves, too.
        num_leaves = tree.topk if kind.num_choices else 0
        shape = RoundShape.of(
            tree,
            draft_vocab_size=self.model.vocab_size,
            max_context_tokens=self.limits.max_context_tokens + num_leaves,
        )
        return TreePass(self.model, shape, self.limits, kind, memory=self._memory)


def _common_shape(tree: TreeShape) -> TreeShape:
    """Returns the shape in which passes grow trees of this depth and width."""
    if tree.topk == 1:
        return replace(tree, num_draft_tokens=tree.num_steps + 1)
    rows = next((size for size in _ROW_BUCKETS if size >= tree.num_draft_tokens), None)
    return replace(tree, num_draft_tokens=rows or tree.num_draft_tokens)
