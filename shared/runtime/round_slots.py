"""The host's map from sequences to slots of the round state."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from shared.runtime.host_copy import HostCopy, PinnedMemory
from shared.runtime.lane_sampling import LaneSampling, QueuedLogprobs
from shared.runtime.prompt_chunks import cut
from shared.runtime.round_batches import MAX_PENDING_ROUNDS
from shared.runtime.round_graphs import RoundOutput
from shared.runtime.round_sampling import RoundSampling
from shared.runtime.round_sequences import NewLane, SequenceRound
from shared.runtime.round_state import NewPage, RoundState, SlotSequence
from shared.runtime.round_verification import RESULT_COUNTS
from shared.tokens import SamplingParams


@dataclass(slots=True)
class PlacedSequence:
    """A sequence in a slot.

    Attributes:
        length: committed tokens the host knows of.
        is_shaped: `LaneSampling` draws for it.
        num_given: prompt tokens that its first round commits before the one that it draws.
        num_pending: most tokens that launched rounds may commit whose results it does not know.
    """

    slot: int
    length: int
    sampling: SamplingParams
    pages: list[int]
    head_pages: list[int]
    is_shaped: bool = False
    num_given: int = 0
    num_pending: int = 0

    @property
    def longest(self) -> int:
        """Most tokens that may be committed when the launched rounds are done."""
        return self.length + self.num_pending


@dataclass(frozen=True, slots=True)
class PendingRound:
    """A launched round: its result on the way to the host, who took part, and its size.

    Attributes:
        max_committed: most tokens that it commits to one sequence.
    """

    result: HostCopy
    logprobs: QueuedLogprobs | None
    sequences: tuple[tuple[int, PlacedSequence], ...]
    num_slots: int
    sampling: RoundSampling
    max_committed: int


class RoundSlots:
    """The sequences of one state and the rounds over it that nobody has read.

    Attributes:
        placed: by the sequence's number.
        num_used: slots up to the last one that is taken; those of sequences that left stay
            empty.
        sampling: what a round of all that are placed needs, beside what `lanes` does.
        lanes: draws for those with penalties and the like.
    """

    def __init__(self, state: RoundState) -> None:
        self.state = state
        self.placed: dict[int, PlacedSequence] = {}
        self.num_used, self.sampling = 0, RoundSampling.GREEDY
        self.lanes = LaneSampling(state.numbers.device)
        self._new_pages: list[NewPage] = []
        self._new_head_pages: list[NewPage] = []
        self._pending: deque[PendingRound] = deque()
        # Prompt tokens by slot, of each sequence whose prompt the next round ends.
        self._chunks: dict[int, dict[int, Sequence[int]]] = {}
        # Of the results, which are read in the order of their rounds.
        self._memory: deque[PinnedMemory] = deque()
        if state.numbers.is_cuda:
            size = state.num_slots * (RESULT_COUNTS + state.open_tokens.shape[1])
            self._memory.extend(PinnedMemory(size, torch.int64) for _ in range(MAX_PENDING_ROUNDS))

    @property
    def num_pending(self) -> int:
        """Launched rounds whose results nobody has read."""
        return len(self._pending)

    @property
    def oldest(self) -> PendingRound:
        """The oldest unread round."""
        return self._pending[0]

    @property
    def prompt_chunks(self) -> Mapping[int, Sequence[int]]:
        """Prompt tokens by slot that the next round computes in place of trees."""
        return {slot: each for own in self._chunks.values() for slot, each in own.items()}

    def take(self, new_lanes: Sequence[NewLane], chunk_size: int = 1) -> dict[int, NewLane]:
        """Gives each new lane a slot, which `fill` has yet to write; returns them by slot. The next
        round gives it more of them where the target has not computed its tokens.

        Args:
            chunk_size: tokens that a round commits in a slot.
        """
        used = {placed.slot for placed in self.placed.values()}
        free = (slot for slot in range(self.state.num_slots) if slot not in used)
        slots = {slot: each for each, slot in zip(new_lanes, free, strict=False)}
        assert len(slots) == len(new_lanes), f"{len(new_lanes)} sequences for {len(slots)} slots"
        for slot, each in slots.items():
            assert len(each.token_ids) >= 2, "a round starts from a computed token"
            assert each.sequence_id not in self.placed, f"sequence {each.sequence_id} is placed"
            chunks = cut(each.uncomputed_token_ids, chunk_size)
            if each.reads_prompt:
                assert not each.is_shaped, "its prompt would count as output"
                self._chunks[each.sequence_id] = {slot: chunks[-1]}
                self._chunks[each.sequence_id] |= {next(free): chunk for chunk in chunks[:-1]}
            self.placed[each.sequence_id] = PlacedSequence(
                slot,
                len(each.token_ids),
                each.sampling,
                list(each.pages),
                list(each.head_pages),
                each.is_shaped,
                len(chunks[-1]) - 1,
            )
        self._look()
        return slots

    def fill(self, slots: dict[int, NewLane]) -> None:
        """Writes sequences to the slots they took."""
        in_slots: dict[int, SlotSequence] = {}
        for slot, each in slots.items():
            start = len(each.token_ids) - self.placed[each.sequence_id].num_given - 1
            in_slots[slot] = each.in_slot(start)
            start = len(each.token_ids) - len(each.uncomputed_token_ids)
            for extra, chunk in self._extra(each.sequence_id).items():
                in_slots[extra] = each.in_slot(start, is_last=False)
                start += len(chunk)
            self.lanes.join(slot, each)
        self.state.place(in_slots)

    def set_pages(
        self, sequence_id: int, pages: Sequence[int], head_pages: Sequence[int] = ()
    ) -> None:
        """Gives a placed sequence its pages; those it has had already must be the same. The device
        has them from the next `write_pages` on."""
        placed = self.placed[sequence_id]
        for known, now, new in (
            (placed.pages, pages, self._new_pages),
            (placed.head_pages, head_pages, self._new_head_pages),
        ):
            first = len(known)
            if len(now) > first:
                known.extend(now[first:])
                new += [(placed.slot, first + k, page) for k, page in enumerate(known[first:])]

    def write_pages(self) -> None:
        """Queues the pages that placed sequences have got, all at once."""
        if self._new_pages or self._new_head_pages:
            self.state.set_pages(self._new_pages, self._new_head_pages)
            self._new_pages, self._new_head_pages = [], []

    def remove(self, sequence_ids: Iterable[int]) -> None:
        """Leaves sequences out from the next launch on."""
        self.write_pages()  # before somebody else has a slot
        gone = list(sequence_ids)
        extra = [slot for each in gone for slot in self._extra(each)]
        slots = [self.placed.pop(each).slot for each in gone]
        for each in gone:
            self._chunks.pop(each, None)
        for slot in slots:
            self.lanes.leave(slot)
        slots += extra
        if slots:
            self._look()
            self.state.clear(slots)

    def launched(self, output: RoundOutput, sampling: RoundSampling, max_committed: int) -> None:
        """A round of all that are placed was queued."""
        result = output.result
        for each in self.placed.values():
            each.num_pending += max_committed
        sequences = tuple(self.placed.items())
        if self._memory:
            assert self.num_pending < len(self._memory), "the oldest result would be overwritten"
            self._memory.rotate(1)
        copy, num_slots = HostCopy(result, self._memory[0] if self._memory else None), len(result)
        self._pending.append(
            PendingRound(copy, output.logprobs, sequences, num_slots, sampling, max_committed)
        )
        extra = [slot for each in self._chunks for slot in self._extra(each)]
        self._chunks = {}
        if extra:
            self._look()
            self.state.clear(extra)

    def result(self) -> tuple[SequenceRound, ...]:
        """Returns what the oldest unread round did, those removed since included; waits for it."""
        pending = self._pending.popleft()
        rows = pending.result.read().tolist()
        logprobs = {} if pending.logprobs is None else pending.logprobs.read()
        rounds: list[SequenceRound] = []
        for sequence_id, placed in pending.sequences:
            count, num_drafted, *tokens = rows[placed.slot]
            # The first round may have had prompt tokens for a tree.
            first, placed.num_given = placed.num_given, 0
            placed.length += count - first
            placed.num_pending -= pending.max_committed
            own = logprobs.get(placed.slot, ())[first:count]
            drawn = tuple(tokens[first:count])
            rounds.append(SequenceRound(sequence_id, drawn, num_drafted - first, own))
        return tuple(rounds)

    def _extra(self, sequence_id: int) -> dict[int, Sequence[int]]:
        """Returns the chunks of a sequence in slots beside its own."""
        chunks = self._chunks.get(sequence_id, {})
        own = self.placed[sequence_id].slot
        return {slot: chunk for slot, chunk in chunks.items() if slot != own}

    def _look(self) -> None:
        """Somebody came or left."""
        placed = self.placed.values()
        used = [*(each.slot for each in placed), *self.prompt_chunks]
        self.num_used = 1 + max(used, default=-1)
        self.sampling = RoundSampling.of(
            (each.sampling for each in placed if not each.is_shaped),
            (each.sampling for each in placed if each.is_shaped),
        )
