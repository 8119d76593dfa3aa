"""Speculative rounds that stay on the device: draft, tree, verification, commit, again.

`launch` queues a round and waits for nothing. Its result, a few numbers a sequence, is copied to
the host behind it; `result` may be asked for one round late, while the next one runs. So the host
decides only who takes part and which pages they have.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shared.kv.batch import SequenceRows, build_batch
from shared.kv.pool import KvPool
from shared.kv.upload import uploaded_numbers
from shared.models.decoder import Decoder
from shared.models.heads.head import DraftHead
from shared.runtime.prompt_chunks import PromptChunks, cut
from shared.runtime.round_batches import MAX_PENDING_ROUNDS, RoundBatches, RoundShape
from shared.runtime.round_graphs import CapturedRound, RoundGraphs, TreeSource
from shared.runtime.round_lockstep import CaptureRound, QueueRound, RoundLeader, SentTrees
from shared.runtime.round_parts import RoundParts
from shared.runtime.round_sampling import RoundSampling
from shared.runtime.round_sequences import NewLane, SequenceRound
from shared.runtime.round_slots import RoundSlots
from shared.runtime.round_state import RoundState
from shared.tokens import TreeShape

_CHUNK_ROWS = 2048


@dataclass(frozen=True, slots=True)
class HeadBacklog:
    """Rows that one sequence lacks in the head's cache.

    Attributes:
        token_ids: committed; the row of position p reads the token after it.
        start: the first row that is missing.
        end: the row behind the last one that is caught up with: a round computes the open ones.
        pages: the target's, where the features are.
        head_pages: the head's.
    """

    token_ids: Sequence[int]
    start: int
    end: int
    pages: Sequence[int]
    head_pages: Sequence[int]


class HeadCatchUp:
    """Computes rows of one head, those of all sequences together.

    Args:
        pool: the head's.
        feature_rows: `[num_slots, W]`, the features of the token in each slot of the target's pool.
    """

    def __init__(self, head: DraftHead, pool: KvPool, feature_rows: Tensor) -> None:
        self._head = head
        self._pool = pool
        self._feature_rows = feature_rows

    @torch.inference_mode()
    def run(self, backlogs: Iterable[HeadBacklog]) -> None:
        """Computes what is missing, in forwards of bounded size."""
        chunk: list[SequenceRows] = []
        feature_slots: list[int] = []
        for backlog in backlogs:
            first, end = backlog.start, backlog.end
            while first < end:
                count = min(end - first, _CHUNK_ROWS - len(feature_slots))
                chunk.append(_rows(backlog, first, count))
                feature_slots += self._slots(backlog.pages, range(first, first + count))
                first += count
                # Rows of a sequence read those before them from the cache: never in one forward.
                if len(feature_slots) == _CHUNK_ROWS:
                    self._forward(chunk, feature_slots)
                    chunk, feature_slots = [], []
        if chunk:
            self._forward(chunk, feature_slots)

    def _forward(self, chunk: Sequence[SequenceRows], feature_slots: Sequence[int]) -> None:
        device = self._pool.device
        batch = build_batch(chunk, page_size=self._pool.page_size, device=device)
        features = self._feature_rows.index_select(0, uploaded_numbers(feature_slots, device))
        self._head.forward(batch, self._head.fuse(features), self._pool)

    def _slots(self, pages: Sequence[int], positions: range) -> list[int]:
        size = self._pool.page_size
        return [pages[position // size] * size + position % size for position in positions]


def _rows(backlog: HeadBacklog, first: int, count: int) -> SequenceRows:
    return SequenceRows.causal(
        backlog.token_ids[first + 1 : first + 1 + count], first, backlog.head_pages
    )


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
        head_pool: the head's, with pages of the same size.
        feature_rows: `[num_slots, W]`, the features of the token in each slot of `pool`.
        parts: what drafts and verifies; None takes what suits head and device.
        graph_memory: see `RoundGraphs`.
        leader: of a decoder that several processes hold, of which this one has the head.
    """

    def __init__(
        self,
        *,
        decoder: Decoder,
        pool: KvPool,
        head: DraftHead,
        head_pool: KvPool,
        feature_rows: Tensor,
        tree: TreeShape,
        limits: RoundLimits,
        parts: RoundParts | None = None,
        graph_memory: Any | None = None,
        leader: RoundLeader | None = None,
    ) -> None:
        assert pool.page_size == head_pool.page_size, "pages differ in size"
        assert len(feature_rows) == pool.num_pages * pool.page_size, "one row a slot"
        self.shape = RoundShape.of(
            tree,
            draft_vocab_size=head.vocabulary.size,
            max_context_tokens=limits.max_context_tokens,
        )
        self.limits, self._device = limits, pool.device
        state = RoundState.empty(
            limits.max_sequences,
            max_open_rows=self.shape.max_committed,
            num_pages=-(-self.shape.max_kv_length // pool.page_size),
            device=pool.device,
        )
        self._slots = RoundSlots(state)
        batches = RoundBatches(self.shape, pool.page_size)
        parts = parts or RoundParts.of(head, self.shape, pool.device)
        draft: TreeSource = parts.draft(head, head_pool, batches, feature_rows)
        self._leader = leader
        if leader is not None:
            assert decoder.group is not None, "nobody follows"
            leader.open(self.shape, limits.max_sequences)
            draft = SentTrees(draft, decoder.group)
        self._graphs = RoundGraphs(
            draft,
            parts.verification(decoder, pool, self.shape, head.feature_spec, feature_rows),
            state,
            graph_memory,
        )
        self._catch_up = HeadCatchUp(head, head_pool, feature_rows)
        # Of sequences whose prompts the last launched round ended, and the next one ends.
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
    def reads_prompts(self) -> bool:
        """Whether the first round of a sequence may compute more tokens than the last one."""
        return self._leader is None

    @property
    def is_waited_for(self) -> bool:
        """Whether other processes wait for a round that broke off here."""
        return self._leader is not None and self._leader.is_waited_for

    @property
    def num_awaited(self) -> int:
        """Sequences of the oldest unread round."""
        return len(self._slots.oldest.sequences)

    def num_computed(self, num_sequences: int) -> int:
        """Returns how many slots a round of sequences computes that are placed together."""
        return self._graphs.num_computed(num_sequences)

    def capture(self, num_sequences: int, sampling: RoundSampling) -> None:
        """Captures the graphs for a number of sequences before anyone waits for them."""
        with self._announced(CaptureRound, num_sequences, sampling):
            self._graphs.make(num_sequences, sampling)

    def captured(self, num_sequences: int, sampling: RoundSampling) -> CapturedRound:
        """Returns the graphs of a round, to be measured part by part."""
        return self._graphs.of(num_sequences, sampling)

    def run_empty(self, num_sequences: int, sampling: RoundSampling) -> None:
        """Queues a round as for so many sequences, while nobody takes part."""
        assert not self._slots.placed, "a round would be lost"
        with self._announced(QueueRound, num_sequences, sampling):
            self._graphs.grow(num_sequences, sampling)
            self._graphs.verify(sampling)

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
            self._catch_up.run(backlogs.values())
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

    @torch.inference_mode()
    def launch(self) -> None:
        """Queues one round of every placed sequence; their pages must cover `num_kv_tokens`.

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
            self._catch_up.run(self._read.values())
        chunks = self._slots.prompt_chunks
        given = PromptChunks.of(chunks, self.shape, self._device) if chunks else None
        with self._announced(QueueRound, self.num_slots, sampling):
            self._graphs.grow(self.num_slots, sampling)
            output = self._graphs.verify(sampling, self._slots.lanes, given)
        self._read, self._reading = self._reading, {}
        self._slots.launched(output, sampling, self.shape.max_committed)

    def result(self) -> tuple[SequenceRound, ...]:
        """Returns what the oldest unread round did, those removed since included; waits for it."""
        return self._slots.result()

    def _announced(
        self, kind: type[CaptureRound | QueueRound], num_slots: int, sampling: RoundSampling
    ) -> AbstractContextManager[None]:
        """Tells the other processes of the decoder, if there are any, what the body does."""
        leader = self._leader
        return nullcontext() if leader is None else leader.announced(kind, num_slots, sampling)
