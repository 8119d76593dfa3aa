"""Speculative rounds that stay on the device: draft, tree, verification, commit, again.

`launch` queues a round and waits for nothing. Its result, a few numbers a sequence, is copied to
the host behind it; `result` may be asked for one round late, while the next one runs. So the host
decides only who takes part and which pages they have.

Where the host also says which tokens some lanes may draw, their trees are copied to it before the
target's forward is queued, and it computes their masks while the device computes that. `finish`
queues the draws.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shared.kv.pool import KvPool
from shared.models.decoder import Decoder
from shared.runtime.host_copy import HostCopy, PinnedMemory
from shared.runtime.lane_sampling import (
    LaneMasks,
    LaneSampling,
    LaneTree,
    QueuedLogprobs,
    TreeCopies,
)
from shared.runtime.lane_states import LaneStates
from shared.runtime.lockstep import Leader, RoundLeader, RoundsKey, SentChunks, SentTrees
from shared.runtime.round_batches import (
    MAX_PENDING_ROUNDS,
    PromptChunks,
    RoundShape,
    SizedShape,
    cut,
)
from shared.runtime.round_graphs import (
    CapturedRound,
    RoundChunks,
    RoundGraphs,
    RoundOutput,
    num_computed,
)
from shared.runtime.round_head import HeadBacklog, TreePlace
from shared.runtime.round_state import (
    NewLane,
    NewPage,
    RoundSampling,
    RoundState,
    SequenceRound,
    SlotSequence,
)
from shared.runtime.round_verification import RESULT_COUNTS, RoundVerification
from shared.runtime.tree_model import fastest
from shared.tokens import SamplingParams, TreeShape

# The host's map from sequences to slots of the round state.


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
    """A launched round: its result on the way to the host, and who took part.

    Attributes:
        max_committed: most tokens that it commits to one sequence.
    """

    result: HostCopy
    logprobs: QueuedLogprobs | None
    sequences: tuple[tuple[int, PlacedSequence], ...]
    max_committed: int


class RoundSlots:
    """The sequences of one state and the rounds over it that nobody has read.

    Attributes:
        placed: by the sequence's number.
        taken: slots that they have, those included where the next round reads their prompts.
        num_used: slots up to the last one that is taken; those of sequences that left stay
            empty.
        sampling: what a round of all that are placed needs, beside what `lanes` does.
        states: recurrent ones; None where the target has none.
        lanes: draws for those with penalties and the like.
    """

    def __init__(self, state: RoundState, decoder: Decoder, pool: KvPool) -> None:
        self.state = state
        self.states = None if pool.states is None else LaneStates(decoder, pool, state)
        self.placed: dict[int, PlacedSequence] = {}
        self.taken: set[int] = set()
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
        taken, num_slots = self.taken, self.state.num_slots
        free = (slot for slot in range(num_slots) if slot not in taken)
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
        if self.states is not None:
            self.states.join(slots)
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
        if self.states is not None:
            self.states.leave(slots)
        slots += extra
        if slots:
            self._look()
            self.state.clear(slots)

    def launched(self, output: RoundOutput, max_committed: int) -> None:
        """A round of all that are placed was queued."""
        result = output.result
        for each in self.placed.values():
            each.num_pending += max_committed
        sequences = tuple(self.placed.items())
        if self._memory:
            assert self.num_pending < len(self._memory), "the oldest result would be overwritten"
            self._memory.rotate(1)
        copy = HostCopy(result, self._memory[0] if self._memory else None)
        self._pending.append(PendingRound(copy, output.logprobs, sequences, max_committed))
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
        self.taken = {each.slot for each in placed} | self.prompt_chunks.keys()
        self.num_used = 1 + max(self.taken, default=-1)
        self.sampling = RoundSampling.of(
            (each.sampling for each in placed if not each.is_shaped),
            (each.sampling for each in placed if each.is_shaped),
        )


@dataclass(frozen=True, slots=True)
class _GrownRound:
    """A round whose trees are queued, and no more.

    Attributes:
        announced: ends what other processes were told.
    """

    sampling: RoundSampling
    chunks: RoundChunks | None
    announced: ExitStack


@dataclass(frozen=True, slots=True)
class _OpenRound:
    """A round whose draws are not queued.

    Attributes:
        masked: slots by sequence.
    """

    grown: _GrownRound
    masked: Mapping[int, int]


@dataclass(frozen=True, slots=True)
class RoundLimits:
    """Sizes fixed at start.

    Attributes:
        max_sequences: slots.
        max_context_tokens: longest sequence that a round may start from.
    """

    max_sequences: int
    max_context_tokens: int


@dataclass(frozen=True, slots=True, eq=False)
class _Rounds:
    """Rounds of one shape.

    Attributes:
        number: of the shape, see `RoundHead`.
        leader: of a decoder that several processes hold.
    """

    number: int
    sized: SizedShape
    graphs: RoundGraphs
    leader: RoundLeader | None

    @property
    def max_committed(self) -> int:
        """Most tokens that a round commits to one sequence."""
        return self.sized.shape.max_committed


class RoundRunner:
    """Rounds of one target with one head, of several shapes, one after the other. A sequence keeps
    its slot when the shape changes.

    Args:
        pool: the target's KV.
        head: the draft model, or what else trees come from.
        feature_rows: `[num_slots, W]`, the features of the token in each slot of `pool`; None for
            a draft that reads none.
        shapes: each with the most sequences of a round. The first is the current one.
        max_context_tokens: longest sequence that a round may start from.
        leader: of a decoder that several processes hold, of which this one has the head.
        place: of the head among those that the target keeps rounds for.

    Attributes:
        is_ahead: whether the next rounds have trees that grow while those before are verified.
    """

    def __init__(
        self,
        *,
        decoder: Decoder,
        pool: KvPool,
        head: TreePlace,
        feature_rows: Tensor | None,
        shapes: Mapping[TreeShape, int],
        max_context_tokens: int,
        leader: Leader | None = None,
        place: int = 0,
    ) -> None:
        if feature_rows is not None:
            num_slots = pool.num_leased_pages * pool.page_size
            assert len(feature_rows) == num_slots, "one row a slot"
        assert leader is None or decoder.group is not None, "nobody follows"
        self._max_context_tokens, self._device = max_context_tokens, pool.device
        self._decoder, self._pool, self._feature_rows = decoder, pool, feature_rows
        self._place, self._leader, self._leader_place = head, leader, place
        sized = [self._sized(tree, most) for tree, most in shapes.items()]
        self._head = head.in_rounds(sized, feature_rows, pool)
        self._slots = RoundSlots(self._head.state, decoder, pool)
        self._group = decoder.group
        # Rounds of two shapes are never under way at once, so their graphs share memory.
        is_cuda = self._device.type == "cuda"
        self._memory: Any = torch.cuda.graph_pool_handle() if is_cuda else None
        self._rounds: dict[TreeShape, _Rounds] = {}
        for tree, each in zip(shapes, sized, strict=True):
            self._rounds[tree] = self._made(each)
        self.is_ahead = False
        self._current = next(iter(self._rounds.values()))
        # Of the rounds after which rows may be open.
        self._last: _Rounds | None = None
        self._grown: _GrownRound | None = None
        self._open: _OpenRound | None = None
        max_rows = max(each.max_sequences * each.shape.num_tree_rows for each in sized)
        self._tree_copies = TreeCopies(max_rows, self._device)
        # Of sequences whose prompts the last launched round ended, and the next one ends.
        self._read: dict[int, HeadBacklog] = {}
        self._reading: dict[int, HeadBacklog] = {}

    def _sized(self, tree: TreeShape, max_sequences: int) -> SizedShape:
        return SizedShape(self._place.shape(tree, self._max_context_tokens), max_sequences)

    def _made(self, sized: SizedShape) -> _Rounds:
        """Returns rounds of one more shape."""
        number, head, group = len(self._rounds), self._head, self._group
        code = self._place.code or fastest(RoundVerification, sized.shape, self._device)
        verification = code(
            self._decoder,
            self._pool,
            sized.shape,
            head.feature_spec,
            self._feature_rows,
            self._slots.states,
        )
        source, leader = head.trees(number, sized), None
        if self._leader is not None and group is not None:
            leader = RoundLeader(self._leader, RoundsKey(self._leader_place, number))
            leader.open(sized, head.state.page_table.shape[1], head.feature_spec)
            source = SentTrees(source, group)
        graphs = RoundGraphs(source, verification, head.view(sized), self._memory)
        return _Rounds(number, sized, graphs, leader)

    @property
    def shape(self) -> RoundShape:
        """Of the next rounds."""
        return self._current.sized.shape

    def shape_of(self, tree: TreeShape) -> RoundShape:
        """Returns the sizes of rounds with trees as they were asked for."""
        return self._rounds[tree].sized.shape

    def takes(self, tree: TreeShape) -> bool:
        """Whether rounds with such trees may come next, with everybody in the slot that they have:
        it is within their number, and prompts that the next round reads are cut for it."""
        rounds = self._rounds[tree]
        is_cut = not self._reading or rounds.max_committed >= self._current.max_committed
        return is_cut and self.num_slots <= rounds.sized.max_sequences

    @torch.inference_mode()
    def turn_to(self, tree: TreeShape) -> None:
        """Has the next rounds grow trees of another shape, which `takes` all that are placed."""
        rounds, last = self._rounds[tree], self._last
        assert not self._slots.placed or self.takes(tree), "sequences would stay behind"
        has_fewer = last is not None and last.max_committed > rounds.max_committed
        if last is not None and has_fewer and self._slots.placed:
            self._catch_up_read()
            self._head.read_open_rows(last.number, self.num_slots)
            self._last = None
        self._current = rounds

    @property
    def target_vocab_size(self) -> int:
        """Tokens that the target can draw."""
        return self._decoder.config.vocab_size

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
    def num_taken(self) -> int:
        """Slots of the next round that somebody has."""
        return len(self._slots.taken)

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
        leaders = (each.leader for each in self._rounds.values())
        return any(each is not None and each.is_waited_for for each in leaders)

    @property
    def is_late(self) -> bool:
        """See `RoundHead.is_late`."""
        return self._head.is_late

    @property
    def is_done(self) -> bool:
        """Whether the oldest unread round can be read without waiting."""
        return self._slots.oldest.result.is_done

    def num_computed(self, num_sequences: int) -> int:
        """Returns how many slots a round of sequences computes that are placed together."""
        return num_computed(num_sequences, self._head.state.num_slots)

    def capture(self, num_sequences: int, sampling: RoundSampling) -> None:
        """Captures the graphs of the current shape for a number of sequences before anyone waits
        for them."""
        leader = self._current.leader
        with nullcontext() if leader is None else leader.capturing(num_sequences, sampling):
            self._current.graphs.make(num_sequences, sampling)

    def captured(self, num_sequences: int, sampling: RoundSampling) -> CapturedRound:
        """Returns the graphs of a round, to be measured part by part."""
        return self._current.graphs.of(num_sequences, sampling)

    def run_empty(
        self, num_sequences: int, sampling: RoundSampling, *, is_ahead: bool = False
    ) -> None:
        """Queues a round as for so many sequences, while nobody takes part."""
        assert not self._slots.placed, "a round would be lost"
        self._head.begin(self._current.number, num_sequences, sampling, is_ahead=is_ahead)
        with self._queueing(num_sequences, sampling):
            self._current.graphs.grow(num_sequences, sampling)
            self._current.graphs.forward()
            self._current.graphs.commit(sampling)

    def num_kv_tokens(self, sequence_id: int) -> tuple[int, int]:
        """Returns how many tokens the target's and the head's pages of a sequence must cover for
        the next launch."""
        length = self.longest(sequence_id)
        return self.shape.num_kv_tokens(length), self.shape.num_head_kv_tokens(length)

    def longest(self, sequence_id: int) -> int:
        """Returns the most tokens of a sequence that may be committed once all rounds are read."""
        return self._slots.placed[sequence_id].longest

    def num_unread(self, sequence_id: int) -> int:
        """Returns how many tokens rounds that nobody has read may commit to a sequence."""
        return self._slots.placed[sequence_id].num_pending

    @torch.inference_mode()
    def place(self, new_lanes: Sequence[NewLane]) -> None:
        """Takes sequences into the next round; their heads catch up first, together.

        Raises:
            torch.OutOfMemoryError: to catch up does not fit the device's memory; the sequences have
                to be removed.
        """
        slots = self._slots.take(new_lanes, self.shape.max_committed)
        read = [each for each in new_lanes if not each.reads_prompt]
        for each in new_lanes:
            if each.reads_prompt:
                self._reading[each.sequence_id] = self._backlog(each)
        if read:
            self._head.catch_up(map(self._backlog, read))
        self._slots.fill(slots)

    def _backlog(self, new_lane: NewLane) -> HeadBacklog:
        """Returns what its head lacks before the first round from whose tokens a tree grows."""
        tokens, size = new_lane.token_ids, self.shape.max_committed
        num_open = len(cut(new_lane.uncomputed_token_ids, size)[-1])
        end = len(tokens) - (num_open if new_lane.reads_prompt else 2)
        slot = self._slots.placed[new_lane.sequence_id].slot
        pages = new_lane.pages, new_lane.head_pages
        return HeadBacklog(tuple(tokens), new_lane.num_head_rows, end, *pages, slot)

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
        if self._grown is None:
            self._grow()
        grown, self._grown = self._grown, None
        assert grown is not None
        slots = {each: self._slots.placed[each].slot for each in masked}
        if slots:
            are_chains = self.shape.tree.topk == 1
            self._tree_copies.queue(self._current.graphs.grown, are_chains=are_chains)
        self._current.graphs.forward(grown.chunks)
        self._open = _OpenRound(grown, slots)
        if not slots:
            self.finish({})

    def _grow(self) -> None:
        """Queues the first part of a round of every placed sequence."""
        placed = self._slots.placed.values()
        assert placed, "nobody takes part"
        assert self.num_pending < MAX_PENDING_ROUNDS, "read a result first"
        for each in placed:
            assert each.length <= self._max_context_tokens, f"{each.length} tokens"
        sampling = self._slots.sampling
        self._slots.write_pages()
        self._catch_up_read()
        chunks = self._slots.prompt_chunks
        given = self._given(chunks) if chunks else None
        number = self._current.number
        self._head.begin(number, self.num_slots, sampling, is_ahead=self.is_ahead)
        announced = ExitStack()
        announced.enter_context(
            self._queueing(self.num_slots, sampling, has_chunks=given is not None)
        )
        self._current.graphs.grow(self.num_slots, sampling)
        self._grown = _GrownRound(sampling, given, announced)

    def masked_trees(self) -> dict[int, LaneTree]:
        """Returns the trees of masked lanes by sequence; waits until they have grown."""
        opened = self._open
        assert opened is not None, "nothing was launched"
        assert opened.masked, "nobody is masked"
        trees = self._tree_copies.read(tuple(opened.masked.values()))
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
        grown = opened.grown
        by_slot = {opened.masked[sequence_id]: rows for sequence_id, rows in masks.items()}
        output = self._current.graphs.commit(
            grown.sampling, self._slots.lanes, grown.chunks, by_slot
        )
        grown.announced.close()
        self._read, self._reading = self._reading, {}
        self._slots.launched(output, self.shape.max_committed)
        self._last = self._current

    def result(self) -> tuple[SequenceRound, ...]:
        """Returns what the oldest unread round did, those removed since included; waits for it."""
        return self._slots.result()

    def _catch_up_read(self) -> None:
        """Catches up with the prompts that the last round ended."""
        if self._read:
            self._head.catch_up(self._read.values())
            self._read = {}

    def _given(self, chunks: Mapping[int, Sequence[int]]) -> RoundChunks:
        given = PromptChunks.of(chunks, self.shape, self._device)
        return given if self._group is None else SentChunks(given, self._group)

    def _queueing(
        self, num_slots: int, sampling: RoundSampling, *, has_chunks: bool = False
    ) -> AbstractContextManager[None]:
        """Tells the other processes of the decoder, if there are any, that the body queues a
        round."""
        leader = self._current.leader
        if leader is None:
            return nullcontext()
        return leader.queueing(num_slots, sampling, has_chunks=has_chunks)
