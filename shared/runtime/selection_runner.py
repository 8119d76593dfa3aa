"""Rounds on the device with trees that drafts push, each prepared for one outcome of a round.

`prepare` queues, behind the round under way, the choice among the trees prepared for its outcomes.
`launch` queues the verification of the chosen trees, at once or when the host knows that any tree
was chosen. Neither waits. So if a tree fits, the device goes from one verification to the next
without the host.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from shared.kv.pool import KvPool
from shared.models.decoder import Decoder
from shared.models.heads.feature_spec import FeatureSpec
from shared.runtime.host_copy import HostCopy
from shared.runtime.round_batches import (
    MAX_PENDING_ROUNDS,
    RoundBatches,
    RoundShape,
    SizedShape,
    StateSizes,
)
from shared.runtime.round_graphs import TreeSource
from shared.runtime.round_head import RoundHead, TreePlace
from shared.runtime.round_runner import RoundLimits, RoundRunner
from shared.runtime.round_selection import PreparedBlock, PreparedTree, RoundSelection
from shared.runtime.round_state import RoundState
from shared.runtime.tree_model import fastest
from shared.tokens import TokenTree, TreeShape

_ROWS = (1, 2, 4, 6, 8, 12, 16, 24, 32, 48, 64)
_DEPTHS = (2, 4, 8, 16, 32)
MAX_TREE_ROWS = _ROWS[-1]
MAX_TREE_DEPTH = _DEPTHS[-1]
# Widths of shapes: it only matters whether nodes have siblings.
_CHAIN, _BRANCHED = 1, 2
PLAIN_SHAPE = TreeShape(0, _CHAIN, _ROWS[0])
"""Shape of rounds without any tree."""
_LARGEST_SHAPE = TreeShape(MAX_TREE_DEPTH, _BRANCHED, MAX_TREE_ROWS)


def covering_shape(trees: Iterable[TokenTree]) -> TreeShape | None:
    """Returns the smallest round shape that holds all the trees; None if they are too large for
    every shape."""
    num_rows, max_depth, topk = 1, 0, _CHAIN
    for tree in trees:
        num_rows = max(num_rows, len(tree) + 1)
        if not _is_chain(tree):
            topk = _BRANCHED
        max_depth = max(max_depth, *tree.depths, 0)
    return _covering(num_rows, max_depth, topk)


def covering_shape_of(shape: TreeShape) -> TreeShape | None:
    """Returns the smallest round shape that holds every tree of `shape`; None if none does."""
    return _covering(
        shape.max_node_count + 1, shape.num_steps, _CHAIN if shape.topk == 1 else _BRANCHED
    )


def _covering(num_rows: int, max_depth: int, topk: int) -> TreeShape | None:
    rows = next((size for size in _ROWS if size >= num_rows), None)
    depth = next((size for size in _DEPTHS if size >= max_depth), None)
    if rows is None or depth is None:
        return None
    if topk == _CHAIN and rows - 1 <= MAX_TREE_DEPTH:
        return TreeShape(rows - 1, _CHAIN, rows)
    return TreeShape(min(depth, rows - 1), _BRANCHED, rows)


def closest_shape(wanted: TreeShape, made: Iterable[TreeShape]) -> TreeShape:
    """Returns the smallest shape of `made`, whose graphs are captured, that holds the trees of
    `wanted` with fewer than twice the rows; else `wanted`. A capture takes as long as many rounds.
    """
    close = [
        shape
        for shape in made
        if wanted.num_draft_tokens <= shape.num_draft_tokens < 2 * wanted.num_draft_tokens
        and wanted.num_steps <= shape.num_steps
        and wanted.topk <= shape.topk
    ]
    return min(close, key=lambda shape: shape.num_draft_tokens, default=wanted)


def _is_chain(tree: TokenTree) -> bool:
    return all(parent == node - 1 for node, parent in enumerate(tree.parent_indices) if node) and (
        not tree.parent_indices or tree.parent_indices[0] is None
    )


@dataclass(frozen=True, slots=True, eq=False)
class PushedTrees(TreePlace):
    """Trees that drafts push, in place of trees that a head grows.

    Attributes:
        features: the features to keep for committed rows; None keeps none.
    """

    block: PreparedBlock
    features: FeatureSpec | None
    code: None = None

    def shape(self, tree: TreeShape, max_context_tokens: int) -> RoundShape:
        # Rounds may be under way when the host learns that a sequence has ended.
        spare = MAX_TREE_ROWS + MAX_PENDING_ROUNDS * (MAX_TREE_DEPTH + 1)
        return RoundShape(tree, tree.num_draft_tokens, max_context_tokens + spare)

    def in_rounds(
        self, shapes: Sequence[SizedShape], feature_rows: Tensor | None, target: KvPool
    ) -> RoundHead:
        state = StateSizes.of(shapes, target.page_size).empty_state(target.device)
        return _PushedRounds(state, self.features, self.block, target.page_size)


@dataclass(frozen=True, slots=True, eq=False)
class _PushedRounds(RoundHead):
    """Rounds without a draft model in this process: nothing reads the open rows."""

    state: RoundState
    feature_spec: FeatureSpec | None
    block: PreparedBlock
    page_size: int

    def view(self, sized: SizedShape) -> RoundState:
        """Returns the whole state: as nothing reads open rows, their number has no limit."""
        return self.state

    def trees(self, number: int, sized: SizedShape) -> TreeSource:
        batches = RoundBatches(sized.shape, self.page_size)
        return fastest(RoundSelection, sized.shape, self.block.device)(self.block, batches)


class SelectionRunner(RoundRunner):
    """Rounds of one target with the trees that drafts push.

    Args:
        pool: the target's KV.
        features: see `PushedTrees`.
        feature_rows: `[num_slots, W]`, where the features are kept.
    """

    def __init__(
        self,
        *,
        decoder: Decoder,
        pool: KvPool,
        limits: RoundLimits,
        features: FeatureSpec | None = None,
        feature_rows: Tensor | None = None,
    ) -> None:
        self._block = PreparedBlock(limits.max_sequences, MAX_TREE_ROWS, pool.device)
        super().__init__(
            decoder=decoder,
            pool=pool,
            head=PushedTrees(self._block, features),
            feature_rows=feature_rows,
            # `turn_to` adds other shapes when trees need them.
            shapes=dict.fromkeys((PLAIN_SHAPE, _LARGEST_SHAPE), limits.max_sequences),
            max_context_tokens=limits.max_context_tokens,
        )
        self._limits = limits
        self._stream: torch.cuda.Stream | None = None
        if pool.device.type == "cuda":
            self._stream = torch.cuda.Stream(pool.device)  # type: ignore[no-untyped-call]
        self._uploaded: torch.cuda.Event | None = None

    @property
    def num_captured(self) -> int:
        """Sets of graphs captured so far."""
        return sum(rounds.graphs.num_captured for rounds in self._rounds.values())

    def made_shape(self, wanted: TreeShape) -> TreeShape:
        """Returns the shape for a round of all placed sequences: one with captured graphs if it can
        replace the wanted shape, see `closest_shape`."""
        count, kind = self._slots.num_used, self._slots.sampling
        made = [
            shape
            for shape, rounds in self._rounds.items()
            if rounds.graphs.num_captured and rounds.graphs.is_made(count, kind)
        ]
        return closest_shape(wanted, made)

    def turn_to(self, tree: TreeShape) -> None:
        """See `RoundRunner.turn_to`; the shape may be new."""
        if tree not in self._rounds:
            sized = self._sized_shape(tree, self._limits.max_sequences)
            self._rounds[tree] = self._new_rounds(sized)
        super().turn_to(tree)

    def prepare(self, prepared: Mapping[int, Sequence[PreparedTree]], shape: TreeShape) -> None:
        """Queues the choice of trees for the next round. A choice that was not launched is dropped.

        Args:
            prepared: trees by sequence, whose pages must cover the round. Sequences without an
                entry sit the round out.
            shape: covers all trees.

        Raises:
            torch.OutOfMemoryError: the graphs for a new shape or a new number of sequences do not
                fit the device's memory; nothing was queued.
        """
        self._grown = None
        self.turn_to(shape)
        # Missing graphs are captured before the trees that they read are uploaded.
        self._current.graphs.make(self._slots.num_used, self._slots.sampling)
        by_slot = {
            self._slots.placed[sequence_id].slot: trees for sequence_id, trees in prepared.items()
        }
        self._uploaded = self._block.upload(by_slot, shape.num_draft_tokens)
        with torch.inference_mode():
            self._grow()

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Runs the body's kernels in parallel to the last round: after the upload of its trees, and
        after all work before that. They may read the results of earlier rounds."""
        if self._stream is None or self._uploaded is None:
            yield
            return
        self._stream.wait_event(self._uploaded)
        with torch.cuda.stream(self._stream):
            yield

    def has_chosen(self) -> bool:
        """Waits for the choice of the last `prepare`; returns whether any sequence takes part."""
        assert self._grown is not None, "nothing was prepared"
        # Nothing is queued behind the choice yet, so this waits for only a few launches.
        return bool(HostCopy(self._slots.state.is_active.contiguous()).read().any())
