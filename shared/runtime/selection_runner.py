"""Speculative rounds on the device whose trees come from elsewhere, prepared for how rounds end.

`prepare` queues, behind the round under way, the choice among the trees that were prepared for its
end. `launch` queues the verification of what was chosen, at once or when the host knows that
anything was. Neither waits. So where a tree is there, the device goes from one verification to the
next without the host.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shared.kv.pool import KvPool
from shared.models.decoder import Decoder
from shared.models.heads.feature_spec import FeatureSpec
from shared.runtime.host_copy import HostCopy
from shared.runtime.round_batches import MAX_PENDING_ROUNDS, RoundBatches, RoundShape
from shared.runtime.round_graphs import CapturedRound, RoundGraphs, num_computed
from shared.runtime.round_runner import RoundLimits, RoundSlots
from shared.runtime.round_selection import PreparedBlock, PreparedTree
from shared.runtime.round_state import NewLane, RoundSampling, RoundState, SequenceRound
from shared.runtime.tree_model import SelectionParts
from shared.tokens import TokenTree, TreeShape

_ROWS = (2, 4, 6, 8, 12, 16, 24, 32, 48, 64)
_DEPTHS = (2, 4, 8, 16, 32)
MAX_TREE_ROWS = _ROWS[-1]
MAX_TREE_DEPTH = _DEPTHS[-1]
# Only whether nodes have siblings matters.
_CHAIN, _BRANCHED = 1, 2
PLAIN_SHAPE = TreeShape(1, _CHAIN, _ROWS[0])
"""Of rounds without any tree."""


def covering_shape(trees: Iterable[TokenTree]) -> TreeShape | None:
    """Returns the smallest shape in which rounds take all of some trees; None where they take none
    that large."""
    num_rows, max_depth, topk = 2, 1, _CHAIN
    for tree in trees:
        num_rows = max(num_rows, len(tree) + 1)
        if not _is_chain(tree):
            topk = _BRANCHED
        max_depth = max(max_depth, *tree.depths, 0)
    return _covering(num_rows, max_depth, topk)


def covering_shape_of(shape: TreeShape) -> TreeShape | None:
    """Returns the shape in which rounds take every tree of a shape; None where there is none."""
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
    """Returns the smallest shape that takes what `wanted` takes: of those whose graphs are made, if
    it has fewer than twice the rows; to make some takes as long as many rounds."""
    near = [
        shape
        for shape in made
        if wanted.num_draft_tokens <= shape.num_draft_tokens < 2 * wanted.num_draft_tokens
        and wanted.num_steps <= shape.num_steps
        and wanted.topk <= shape.topk
    ]
    return min(near, key=lambda shape: shape.num_draft_tokens, default=wanted)


def _is_chain(tree: TokenTree) -> bool:
    return all(parent == node - 1 for node, parent in enumerate(tree.parent_indices) if node) and (
        not tree.parent_indices or tree.parent_indices[0] is None
    )


class SelectionRunner:
    """Rounds of one target without a head.

    Args:
        pool: the target's KV.
        features: what is kept of the rows that are committed; None keeps nothing.
        feature_rows: `[num_slots, W]`, where.
        graph_memory: see `RoundGraphs`.
    """

    def __init__(
        self,
        *,
        decoder: Decoder,
        pool: KvPool,
        limits: RoundLimits,
        features: FeatureSpec | None = None,
        feature_rows: Tensor | None = None,
        graph_memory: Any | None = None,
    ) -> None:
        self.limits = limits
        self._decoder = decoder
        self._pool = pool
        self._features = features
        self._feature_rows = feature_rows
        if graph_memory is None and pool.device.type == "cuda":
            # Rounds of two shapes follow one another, so their graphs share memory.
            graph_memory = torch.cuda.graph_pool_handle()
        self._graph_memory = graph_memory
        # Rounds may be under way when the host learns that a sequence has ended.
        spare = MAX_TREE_ROWS + MAX_PENDING_ROUNDS * (MAX_TREE_DEPTH + 1)
        self._max_kv_length = limits.max_context_tokens + spare
        state = RoundState.empty(
            limits.max_sequences,
            max_open_rows=MAX_TREE_DEPTH + 1,
            num_pages=-(-self._max_kv_length // pool.page_size),
            device=pool.device,
        )
        self._slots = RoundSlots(state, decoder, pool)
        self._block = PreparedBlock(limits.max_sequences, MAX_TREE_ROWS, pool.device)
        self._rounds: dict[TreeShape, RoundGraphs] = {}
        self._prepared: _Prepared | None = None
        self._stream: torch.cuda.Stream | None = None
        if pool.device.type == "cuda":
            self._stream = torch.cuda.Stream(pool.device)  # type: ignore[no-untyped-call]
        self._uploaded: torch.cuda.Event | None = None

    @property
    def sequence_ids(self) -> frozenset[int]:
        """The sequences that have a slot."""
        return frozenset(self._slots.placed)

    @property
    def num_pending(self) -> int:
        """Launched rounds whose results nobody has read."""
        return self._slots.num_pending

    @property
    def num_captured(self) -> int:
        """Pairs of graphs so far."""
        return sum(rounds.num_captured for rounds in self._rounds.values())

    @property
    def is_done(self) -> bool:
        """Whether the oldest unread round can be read without waiting."""
        return self._slots.oldest.result.is_done

    def num_computed(self, num_sequences: int) -> int:
        """Returns how many slots a round computes that this many more sequences join."""
        return num_computed(self._slots.num_used + num_sequences, self.limits.max_sequences)

    def made_shape(self, wanted: TreeShape) -> TreeShape:
        """Returns the shape of a round of all that are placed: one whose graphs are there, if it
        can stand for the one that is wanted."""
        if self._graph_memory is None:
            return wanted
        count, kind = self._slots.num_used, self._slots.sampling
        made = [shape for shape, rounds in self._rounds.items() if rounds.is_made(count, kind)]
        return closest_shape(wanted, made)

    def captured(self, shape: TreeShape) -> CapturedRound:
        """Returns the graphs of a round of all that are placed, to be measured part by part."""
        return self._rounds_of(shape).of(self._slots.num_used, self._slots.sampling)

    def capture(self, num_sequences: int, shape: TreeShape, sampling: RoundSampling) -> None:
        """Captures the graphs for a number of sequences before anyone waits for them.

        Raises:
            torch.OutOfMemoryError: they do not fit the device's memory.
        """
        self._rounds_of(shape).make(num_sequences, sampling)

    def num_kv_tokens(self, sequence_id: int, shape: TreeShape) -> int:
        """Returns how many tokens the pages of a sequence must cover for the next round."""
        return self._slots.placed[sequence_id].longest - 1 + shape.num_draft_tokens

    @torch.inference_mode()
    def place(self, new_lanes: Sequence[NewLane]) -> None:
        """Gives sequences a slot each; what `new_lanes` say of a head is not read."""
        self._slots.fill(self._slots.take(new_lanes))

    def set_pages(self, sequence_id: int, pages: Sequence[int]) -> None:
        """Gives a placed sequence its pages; those it has had already must be the same."""
        self._slots.set_pages(sequence_id, pages)

    @torch.inference_mode()
    def remove(self, sequence_ids: Iterable[int]) -> None:
        """Takes sequences from their slots. Rounds under way may still write to their pages,
        before anything that is queued later."""
        self._slots.remove(sequence_ids)

    def prepare(self, prepared: Mapping[int, Sequence[PreparedTree]], shape: TreeShape) -> None:
        """Queues the choice of trees for the next round, in place of any that was not launched.

        Args:
            prepared: by sequence; those that are left out sit the round out. Their pages must
                cover `num_kv_tokens`.
            shape: covers all trees.

        Raises:
            torch.OutOfMemoryError: a shape or a number of sequences that is new to the device does
                not fit its memory; nothing was queued.
        """
        assert self.num_pending < MAX_PENDING_ROUNDS, "read a result first"
        placed = self._slots.placed
        for each in placed.values():
            assert each.length <= self.limits.max_context_tokens, f"{each.length} tokens"
        self._prepared = None
        with torch.inference_mode():
            self._slots.write_pages()
        rounds, sampling = self._rounds_of(shape), self._slots.sampling
        # Graphs that are missing are made before the trees that they will read are queued.
        rounds.make(self._slots.num_used, sampling)
        by_slot = {placed[sequence_id].slot: trees for sequence_id, trees in prepared.items()}
        self._uploaded = self._block.upload(by_slot, shape.num_draft_tokens)
        rounds.grow(self._slots.num_used, sampling)
        self._prepared = _Prepared(rounds, shape, sampling)

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Runs the body's kernels after the upload of the last round's trees and after all earlier
        work, in parallel to that round. They may read the results of earlier rounds."""
        if self._stream is None or self._uploaded is None:
            yield
            return
        self._stream.wait_event(self._uploaded)
        with torch.cuda.stream(self._stream):
            yield

    def has_chosen(self) -> bool:
        """Waits for the choice that was prepared; whether any sequence takes part."""
        assert self._prepared is not None, "nothing was prepared"
        # Nothing is queued behind the choice yet, and few launches wait for it.
        return bool(HostCopy(self._slots.state.is_active.contiguous()).read().any())

    def launch(self) -> None:
        """Queues the verification of what was prepared."""
        prepared, self._prepared = self._prepared, None
        assert prepared is not None, "nothing was prepared"
        prepared.rounds.forward()
        output = prepared.rounds.commit(prepared.sampling, self._slots.lanes)
        self._slots.launched(output, prepared.sampling, prepared.shape.num_steps + 1)

    def result(self) -> tuple[SequenceRound, ...]:
        """Returns what the oldest unread round did, those removed since included, and those that
        sat it out without tokens; waits for it."""
        return self._slots.result()

    def _rounds_of(self, shape: TreeShape) -> RoundGraphs:
        if shape not in self._rounds:
            self._rounds[shape] = self._made(shape)
        return self._rounds[shape]

    @torch.inference_mode()
    def _made(self, shape: TreeShape) -> RoundGraphs:
        sizes = RoundShape(shape, shape.num_draft_tokens, self._max_kv_length)
        batches = RoundBatches(sizes, self._pool.page_size)
        parts = SelectionParts.of(self._pool.device)
        return RoundGraphs(
            parts.selection(self._block, batches),
            parts.verification(
                self._decoder,
                self._pool,
                sizes,
                self._features,
                self._feature_rows,
                self._slots.states,
            ),
            self._slots.state,
            self._graph_memory,
        )


@dataclass(frozen=True, slots=True)
class _Prepared:
    """A round whose trees are chosen, and which is not launched."""

    rounds: RoundGraphs
    shape: TreeShape
    sampling: RoundSampling
