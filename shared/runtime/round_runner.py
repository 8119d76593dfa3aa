"""Speculative rounds that stay on the device: draft, tree, verification, commit, again.

`launch` queues a round and waits for nothing. Its result, a few numbers a sequence, is copied to
the host behind it; `result` may be asked for one round late, while the next one runs. So the host
decides only who takes part and which pages they have.

Where the host also says which tokens some lanes may draw, their trees are copied to it before the
target's forward is queued, and it computes their masks while the device computes that. `finish`
queues the draws.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shared.kv.pool import KvPool
from shared.models.decoder import Decoder
from shared.runtime.lane_trees import LaneMasks, LaneTree, QueuedTrees, TreeCopies
from shared.runtime.prompt_chunks import PromptChunks, cut
from shared.runtime.round_batches import MAX_PENDING_ROUNDS, RoundShape
from shared.runtime.round_graphs import (
    CapturedRound,
    RoundChunks,
    RoundGraphs,
    TreeSource,
)
from shared.runtime.round_head import HeadBacklog, HeadPlace
from shared.runtime.round_lockstep import RoundLeader, SentChunks, SentTrees
from shared.runtime.round_sampling import RoundSampling
from shared.runtime.round_sequences import NewLane, SequenceRound
from shared.runtime.round_slots import RoundSlots
from shared.tokens import TreeShape


@dataclass(frozen=True, slots=True)
class _OpenRound:
    """A round whose draws are not queued.

    Attributes:
        masked: slots by sequence.
        trees: None where nobody is masked.
        announced: ends what other processes were told.
    """

    sampling: RoundSampling
    chunks: RoundChunks | None
    masked: Mapping[int, int]
    trees: QueuedTrees | None
    announced: ExitStack


@dataclass(frozen=True, slots=True)
class RoundLimits:
    """Sizes fixed at start.

    Attributes:
        max_sequences: slots.
        max_context_tokens: longest sequence that a round may start from.
    """

    max_sequences: int
    max_context_tokens: int


class RoundRunner:
    """Rounds of one target with one head.

    Args:
        pool: the target's KV.
        feature_rows: `[num_slots, W]`, the features of the token in each slot of `pool`; None for
            a draft that reads none.
        number: of the shape among those that the head has.
        graph_memory: see `RoundGraphs`.
        leader: of a decoder that several processes hold, of which this one has the head.

    Attributes:
        is_ahead: whether the next rounds have trees that grow while those before are verified.
    """

    def __init__(
        self,
        *,
        decoder: Decoder,
        pool: KvPool,
        head: HeadPlace,
        feature_rows: Tensor | None,
        tree: TreeShape,
        limits: RoundLimits,
        number: int = 0,
        graph_memory: Any | None = None,
        leader: RoundLeader | None = None,
    ) -> None:
        if feature_rows is not None:
            assert len(feature_rows) == pool.num_pages * pool.page_size, "one row a slot"
        self.shape = RoundShape.of(
            tree,
            draft_vocab_size=head.vocab_size,
            max_context_tokens=limits.max_context_tokens,
            num_outcomes=head.num_outcomes,
        )
        self.is_ahead = False
        self.limits, self._device = limits, pool.device
        self._head = head.in_rounds(number, self.shape, limits.max_sequences, feature_rows, pool)
        self._slots = RoundSlots(self._head.state)
        source: TreeSource = self._head
        self._leader, self._group = leader, decoder.group
        if leader is not None:
            assert decoder.group is not None, "nobody follows"
            leader.open(self.shape, limits.max_sequences)
            source = SentTrees(source, decoder.group)
        verification = head.verification(self.shape)(
            decoder, pool, self.shape, self._head.feature_spec, feature_rows
        )
        self._graphs = RoundGraphs(source, verification, self._head.state, graph_memory)
        # Of sequences whose prompts the last launched round ended, and the next one ends.
        self._open: _OpenRound | None = None
        max_rows = limits.max_sequences * self.shape.num_tree_rows
        self._tree_copies = TreeCopies(max_rows, self._device)
        self._read: dict[int, HeadBacklog] = {}
        self._reading: dict[int, HeadBacklog] = {}

    @property
    def sequence_ids(self) -> frozenset[int]:
        """The sequences that take part in the next round."""
        return frozenset(self._slots.placed)

    def holds(self, sequence_id: int) -> bool:
        """Whether a sequence takes part in the next round."""
        return sequence_id in self._slots.placed

    @property
    def num_placed(self) -> int:
        """Number of sequences that take part in the next round."""
        return len(self._slots.placed)

    @property
    def num_slots(self) -> int:
        """Slots up to the last one that is taken; those of sequences that left stay empty."""
        return self._slots.num_used

    @property
    def num_pending(self) -> int:
        """Launched rounds whose results nobody has read."""
        return self._slots.num_pending

    @property
    def is_waited_for(self) -> bool:
        """Whether other processes wait for a round that broke off here."""
        return self._leader is not None and self._leader.is_waited_for

    @property
    def is_late(self) -> bool:
        """See `RoundHead.is_late`."""
        return self._head.is_late

    @property
    def num_awaited(self) -> int:
        """Sequences of the oldest unread round."""
        return len(self._slots.oldest.sequences)

    def num_computed(self, num_sequences: int) -> int:
        """Returns how many slots a round of sequences computes that are placed together."""
        return self._graphs.num_computed(num_sequences)

    def capture(self, num_sequences: int, sampling: RoundSampling) -> None:
        """Captures the graphs for a number of sequences before anyone waits for them."""
        leader = self._leader
        with nullcontext() if leader is None else leader.capturing(num_sequences, sampling):
            self._graphs.make(num_sequences, sampling)

    def captured(self, num_sequences: int, sampling: RoundSampling) -> CapturedRound:
        """Returns the graphs of a round, to be measured part by part."""
        return self._graphs.of(num_sequences, sampling)

    def run_empty(
        self, num_sequences: int, sampling: RoundSampling, *, is_ahead: bool = False
    ) -> None:
        """Queues a round as for so many sequences, while nobody takes part."""
        assert not self._slots.placed, "a round would be lost"
        self._head.begin(num_sequences, sampling, is_ahead=is_ahead)
        with self._queueing(num_sequences, sampling):
            self._graphs.grow(num_sequences, sampling)
            self._graphs.forward()
            self._graphs.commit(sampling)

    def num_kv_tokens(self, sequence_id: int) -> tuple[int, int]:
        """Returns how many tokens the target's and the head's pages of a sequence must cover for
        the next launch."""
        length = self._slots.placed[sequence_id].longest
        return self.shape.num_kv_tokens(length), self.shape.num_head_kv_tokens(length)

    @torch.inference_mode()
    def place(self, new_lanes: Sequence[NewLane]) -> None:
        """Takes sequences into the next round; their heads catch up first, together.

        Raises:
            torch.OutOfMemoryError: to catch up does not fit the device's memory; the sequences have
                to be removed.
        """
        slots = self._slots.take(new_lanes, self.shape.max_committed)
        backlogs = {each.sequence_id: self._backlog(each) for each in new_lanes}
        for each in new_lanes:
            if each.reads_prompt:
                self._reading[each.sequence_id] = backlogs.pop(each.sequence_id)
        if backlogs:
            self._head.catch_up(backlogs.values())
        self._slots.fill(slots)

    def _backlog(self, new_lane: NewLane) -> HeadBacklog:
        """Returns what its head lacks before the first round from whose tokens a tree grows."""
        tokens, size = new_lane.token_ids, self.shape.max_committed
        num_open = len(cut(new_lane.uncomputed_token_ids, size)[-1])
        end = len(tokens) - (num_open if new_lane.reads_prompt else 2)
        return HeadBacklog(
            tuple(tokens), new_lane.num_head_rows, end, new_lane.pages, new_lane.head_pages
        )

    def set_pages(self, sequence_id: int, pages: Sequence[int], head_pages: Sequence[int]) -> None:
        """Gives a placed sequence its pages; those it has had already must be the same."""
        self._slots.set_pages(sequence_id, pages, head_pages)

    @torch.inference_mode()
    def remove(self, sequence_ids: Iterable[int]) -> None:
        """Leaves sequences out from the next launch on. Rounds under way may still write to their
        pages, before anything that is queued later."""
        gone = list(sequence_ids)
        for each in gone:
            self._read.pop(each, None)
            self._reading.pop(each, None)
        self._slots.remove(gone)

    @property
    def awaits_masks(self) -> bool:
        """Whether a round was launched with masked lanes and is to be finished."""
        return self._open is not None

    @torch.inference_mode()
    def launch(self, masked: Iterable[int] = ()) -> None:
        """Queues one round of every placed sequence; their pages must cover `num_kv_tokens`.

        Args:
            masked: sequences whose draws wait for masks. Where there are any, `finish` is to be
                called, once their results of all earlier rounds are read.

        Raises:
            torch.OutOfMemoryError: a number of sequences or a kind of sampling that is new to the
                device does not fit its memory; nothing was launched.
        """
        placed = self._slots.placed.values()
        assert placed, "nobody takes part"
        assert self.num_pending < MAX_PENDING_ROUNDS, "read a result first"
        for each in placed:
            assert each.length <= self.limits.max_context_tokens, f"{each.length} tokens"
        sampling = self._slots.sampling
        self._slots.write_pages()
        if self._read:
            self._head.catch_up(self._read.values())
        chunks = self._slots.prompt_chunks
        given = self._given(chunks) if chunks else None
        self._head.begin(self.num_slots, sampling, is_ahead=self.is_ahead)
        announced = ExitStack()
        announced.enter_context(
            self._queueing(self.num_slots, sampling, has_chunks=given is not None)
        )
        self._graphs.grow(self.num_slots, sampling)
        slots = {each: self._slots.placed[each].slot for each in masked}
        trees = None
        if slots:
            are_chains = self.shape.tree.topk == 1
            trees = self._tree_copies.queue(self._graphs.grown, are_chains=are_chains)
        self._graphs.forward(given)
        self._open = _OpenRound(sampling, given, slots, trees, announced)
        if not slots:
            self.finish({})

    def masked_trees(self) -> dict[int, LaneTree]:
        """Returns the trees of masked lanes by sequence; waits until they have grown."""
        opened = self._open
        assert opened is not None, "nothing was launched"
        assert opened.trees is not None, "nobody is masked"
        trees = opened.trees.read(tuple(opened.masked.values()))
        return dict(zip(opened.masked, trees, strict=True))

    @torch.inference_mode()
    def finish(self, masks: LaneMasks) -> None:
        """Queues the draws of the round that was launched, and its commit.

        Args:
            masks: by sequence, of rows of its tree.

        Raises:
            torch.OutOfMemoryError: nothing was launched.
        """
        opened, self._open = self._open, None
        assert opened is not None, "nothing was launched"
        by_slot = {opened.masked[sequence_id]: rows for sequence_id, rows in masks.items()}
        output = self._graphs.commit(opened.sampling, self._slots.lanes, opened.chunks, by_slot)
        opened.announced.close()
        self._read, self._reading = self._reading, {}
        self._slots.launched(output, opened.sampling, self.shape.max_committed)

    def result(self) -> tuple[SequenceRound, ...]:
        """Returns what the oldest unread round did, those removed since included; waits for it."""
        return self._slots.result()

    def _given(self, chunks: Mapping[int, Sequence[int]]) -> RoundChunks:
        given = PromptChunks.of(chunks, self.shape, self._device)
        return given if self._group is None else SentChunks(given, self._group)

    def _queueing(
        self, num_slots: int, sampling: RoundSampling, *, has_chunks: bool = False
    ) -> AbstractContextManager[None]:
        """Tells the other processes of the decoder, if there are any, that the body queues a
        round."""
        if self._leader is None:
            return nullcontext()
        return self._leader.queueing(num_slots, sampling, has_chunks=has_chunks)
