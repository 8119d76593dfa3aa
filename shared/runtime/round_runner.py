"""Speculative rounds that stay on the device: draft, tree, verification, commit, again.

`launch` queues a round and waits for nothing. The result of a round, a few numbers for each
sequence, is copied to the host behind it. The host may read it one round late, while the next round
runs. So the host decides only which sequences take part and which pages they have.

A grammar on the host restricts the tokens of some lanes. The trees of these lanes are copied to the
host before the target's forward is queued, and the host computes their masks during that forward.
`finish` then queues the draws.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shared.kv.pool import KvPool
from shared.models.decoder import Decoder
from shared.runtime.host_copy import HostCopy, PinnedMemory, UploadMemory
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

_RANKS_S = 1e-3
"""Within that time the decoder's other ranks mostly hear of a round, and queue it."""

# The host's map from sequences to slots of the round state.


@dataclass(slots=True)
class PlacedSequence:
    """A sequence in a slot.

    Attributes:
        length: committed tokens the host knows of.
        is_shaped: whether `LaneSampling` draws for it.
        num_prompt_committed: prompt tokens that its first round commits before the drawn token.
        num_pending: most tokens that launched rounds may commit whose results are not yet read.
    """

    slot: int
    length: int
    sampling: SamplingParams
    pages: list[int]
    head_pages: list[int]
    is_shaped: bool = False
    num_prompt_committed: int = 0
    num_pending: int = 0

    @property
    def longest(self) -> int:
        """Most tokens that may be committed when the launched rounds are done."""
        return self.length + self.num_pending


@dataclass(frozen=True, slots=True)
class PendingRound:
    """A launched round: its result on the way to the host, and the sequences that took part.

    Attributes:
        max_committed: most tokens that the round commits to one sequence.
    """

    result: HostCopy
    logprobs: QueuedLogprobs | None
    sequences: tuple[tuple[int, PlacedSequence], ...]
    max_committed: int


class RoundSlots:
    """The sequences in the slots of one state, and the launched rounds whose results are unread.

    Attributes:
        placed: sequences by id.
        taken: occupied slots, including those that compute prompt chunks in the next round.
        num_used: slots up to the last occupied one. Slots of removed sequences stay empty.
        sampling: kind of sampling that covers all placed sequences, beside what `lanes` draws.
        states: recurrent states; None where the target has none.
        lanes: draws for sequences with penalties, bias or bans.
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
        # Prompt tokens by slot, for each sequence whose prompt the next round ends.
        self._chunks: dict[int, dict[int, Sequence[int]]] = {}
        # Host memory of the results, which are read in the order of their rounds.
        self._memory: deque[PinnedMemory] = deque()
        if state.numbers.is_cuda:
            size = state.num_slots * (RESULT_COUNTS + state.open_tokens.shape[1])
            self._memory.extend(PinnedMemory(size, torch.int64) for _ in range(MAX_PENDING_ROUNDS))

    @property
    def num_pending(self) -> int:
        """Launched rounds whose results are unread."""
        return len(self._pending)

    @property
    def oldest(self) -> PendingRound:
        """The oldest unread round."""
        return self._pending[0]

    @property
    def prompt_chunks(self) -> Mapping[int, Sequence[int]]:
        """Prompt tokens by slot that the next round computes in place of trees."""
        return {slot: chunk for own in self._chunks.values() for slot, chunk in own.items()}

    def take(self, new_lanes: Sequence[NewLane], chunk_size: int = 1) -> dict[int, NewLane]:
        """Reserves a slot for each new lane, which `fill` has yet to write; returns lanes by slot.
        A lane with more uncomputed tokens than one chunk gets extra slots for the next round.

        Args:
            chunk_size: tokens that a round commits in a slot.
        """
        taken, num_slots = self.taken, self.state.num_slots
        free = (slot for slot in range(num_slots) if slot not in taken)
        slots = {slot: lane for lane, slot in zip(new_lanes, free, strict=False)}
        assert len(slots) == len(new_lanes), f"{len(new_lanes)} sequences for {len(slots)} slots"
        for slot, lane in slots.items():
            assert len(lane.token_ids) >= 2, "a round starts from a computed token"
            assert lane.sequence_id not in self.placed, f"sequence {lane.sequence_id} is placed"
            chunks = cut(lane.uncomputed_token_ids, chunk_size)
            if lane.reads_prompt:
                assert not lane.is_shaped, "its prompt would count as output"
                self._chunks[lane.sequence_id] = {slot: chunks[-1]}
                self._chunks[lane.sequence_id] |= {next(free): chunk for chunk in chunks[:-1]}
            self.placed[lane.sequence_id] = PlacedSequence(
                slot,
                len(lane.token_ids),
                lane.sampling,
                list(lane.pages),
                list(lane.head_pages),
                lane.is_shaped,
                len(chunks[-1]) - 1,
            )
        self._refresh()
        return slots

    def fill(self, slots: dict[int, NewLane]) -> None:
        """Writes lanes to the slots that `take` reserved."""
        in_slots: dict[int, SlotSequence] = {}
        for slot, lane in slots.items():
            start = len(lane.token_ids) - self.placed[lane.sequence_id].num_prompt_committed - 1
            in_slots[slot] = lane.in_slot(start)
            start = len(lane.token_ids) - len(lane.uncomputed_token_ids)
            for extra, chunk in self._extra_chunks(lane.sequence_id).items():
                in_slots[extra] = lane.in_slot(start, is_last=False)
                start += len(chunk)
            self.lanes.join(slot, lane)
        if self.states is not None:
            self.states.join(slots)
        self.state.place(in_slots)

    def set_pages(
        self, sequence_id: int, pages: Sequence[int], head_pages: Sequence[int] = ()
    ) -> None:
        """Sets all pages of a placed sequence, which begin with the pages it has. The next
        `write_pages` sends the new ones to the device."""
        placed = self.placed[sequence_id]
        for held, now, new in (
            (placed.pages, pages, self._new_pages),
            (placed.head_pages, head_pages, self._new_head_pages),
        ):
            first = len(held)
            if len(now) > first:
                held.extend(now[first:])
                new += [(placed.slot, first + k, page) for k, page in enumerate(held[first:])]

    def write_pages(self) -> None:
        """Queues one copy of all new pages to the device."""
        if self._new_pages or self._new_head_pages:
            self.state.set_pages(self._new_pages, self._new_head_pages)
            self._new_pages, self._new_head_pages = [], []

    def remove(self, sequence_ids: Iterable[int]) -> None:
        """Removes sequences from the next launch on."""
        self.write_pages()  # before another sequence takes the slot
        removed = list(sequence_ids)
        extra = [slot for sequence_id in removed for slot in self._extra_chunks(sequence_id)]
        slots = [self.placed.pop(sequence_id).slot for sequence_id in removed]
        for sequence_id in removed:
            self._chunks.pop(sequence_id, None)
        for slot in slots:
            self.lanes.leave(slot)
        if self.states is not None:
            self.states.leave(slots)
        slots += extra
        if slots:
            self._refresh()
            self.state.clear(slots)

    def launched(self, output: RoundOutput, max_committed: int) -> None:
        """Records that a round of all placed sequences was queued."""
        for placed in self.placed.values():
            placed.num_pending += max_committed
        sequences = tuple(self.placed.items())
        if self._memory:
            assert self.num_pending < len(self._memory), "the oldest result would be overwritten"
            self._memory.rotate(1)
        copy = HostCopy(output.result, self._memory[0] if self._memory else None)
        self._pending.append(PendingRound(copy, output.logprobs, sequences, max_committed))
        extra = [slot for sequence_id in self._chunks for slot in self._extra_chunks(sequence_id)]
        self._chunks = {}
        if extra:
            self._refresh()
            self.state.clear(extra)

    def result(self) -> tuple[SequenceRound, ...]:
        """Waits for the oldest unread round; returns its results, removed sequences included."""
        pending = self._pending.popleft()
        rows = pending.result.read().tolist()
        logprobs = {} if pending.logprobs is None else pending.logprobs.read()
        rounds: list[SequenceRound] = []
        for sequence_id, placed in pending.sequences:
            count, num_drafted, *tokens = rows[placed.slot]
            # The first round may have committed prompt tokens in place of a tree.
            first, placed.num_prompt_committed = placed.num_prompt_committed, 0
            placed.length += count - first
            placed.num_pending -= pending.max_committed
            own = logprobs.get(placed.slot, ())[first:count]
            drawn = tuple(tokens[first:count])
            rounds.append(SequenceRound(sequence_id, drawn, num_drafted - first, own))
        return tuple(rounds)

    def _extra_chunks(self, sequence_id: int) -> dict[int, Sequence[int]]:
        """Returns the prompt chunks of a sequence outside its own slot, by slot."""
        chunks = self._chunks.get(sequence_id, {})
        own = self.placed[sequence_id].slot
        return {slot: chunk for slot, chunk in chunks.items() if slot != own}

    def _refresh(self) -> None:
        """Derives the attributes anew after sequences joined or left."""
        sequences = self.placed.values()
        self.taken = {placed.slot for placed in sequences} | self.prompt_chunks.keys()
        self.num_used = 1 + max(self.taken, default=-1)
        self.sampling = RoundSampling.of(
            (placed.sampling for placed in sequences if not placed.is_shaped),
            (placed.sampling for placed in sequences if placed.is_shaped),
        )


@dataclass(frozen=True, slots=True)
class _GrownRound:
    """A round of which only the trees are queued.

    Attributes:
        announced: open announcement to the other ranks; closed once the round is queued.
    """

    sampling: RoundSampling
    chunks: RoundChunks | None
    announced: ExitStack


@dataclass(frozen=True, slots=True)
class _OpenRound:
    """A round whose forward is queued and whose draws are not.

    Attributes:
        masked: slots of masked lanes, by sequence.
    """

    grown: _GrownRound
    masked: Mapping[int, int]


@dataclass(frozen=True, slots=True)
class RoundLimits:
    """Sizes fixed at start-up.

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
        number: number of the shape, see `RoundHead`.
        leader: announces rounds to the other ranks of a tensor parallel decoder.
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
        head: the source of the trees, such as the draft model.
        feature_rows: `[num_slots, W]`, the features of the token in each slot of `pool`; None for
            a draft that reads none.
        shapes: tree shapes, each with the most sequences of a round. The first is the current one.
        max_context_tokens: longest sequence that a round may start from.
        leader: on the rank with the head, announces rounds to the decoder's other ranks.
        place: index of the head among those that the target keeps rounds for.

    Attributes:
        is_ahead: whether the next trees grow while the trees before them are verified.
        mask_memory: where the masks for `finish` are written.
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
            assert len(feature_rows) == num_slots, "one row for each slot"
        assert leader is None or decoder.group is not None, "a leader needs a group"
        self._max_context_tokens, self._device = max_context_tokens, pool.device
        self._decoder, self._pool, self._feature_rows = decoder, pool, feature_rows
        self._place, self._leader, self._leader_place = head, leader, place
        sized_shapes = [self._sized_shape(tree, most) for tree, most in shapes.items()]
        self._head = head.in_rounds(sized_shapes, feature_rows, pool)
        self._slots = RoundSlots(self._head.state, decoder, pool)
        self._group = decoder.group
        # Rounds of two shapes are never under way at once, so their graphs share memory.
        is_cuda = self._device.type == "cuda"
        self._memory: Any = torch.cuda.graph_pool_handle() if is_cuda else None
        self._rounds: dict[TreeShape, _Rounds] = {}
        for tree, sized in zip(shapes, sized_shapes, strict=True):
            self._rounds[tree] = self._new_rounds(sized)
        self.is_ahead = False
        self._current = next(iter(self._rounds.values()))
        # The rounds launched last, whose commits may have left open rows.
        self._last: _Rounds | None = None
        self._grown: _GrownRound | None = None
        self._open: _OpenRound | None = None
        max_rows = max(sized.max_sequences * sized.shape.num_tree_rows for sized in sized_shapes)
        self._tree_copies = TreeCopies(max_rows, self._device)
        self.mask_memory = UploadMemory(self._device)
        # For sequences whose prompts the last launched round ended, and the next round ends.
        self._backlogs: dict[int, HeadBacklog] = {}
        self._next_backlogs: dict[int, HeadBacklog] = {}

    def _sized_shape(self, tree: TreeShape, max_sequences: int) -> SizedShape:
        return SizedShape(self._place.shape(tree, self._max_context_tokens), max_sequences)

    def _new_rounds(self, sized: SizedShape) -> _Rounds:
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
        """Sizes of the next rounds."""
        return self._current.sized.shape

    def shape_of(self, tree: TreeShape) -> RoundShape:
        """Returns the sizes of rounds with trees of a requested shape."""
        return self._rounds[tree].sized.shape

    def takes(self, tree: TreeShape) -> bool:
        """Whether the next rounds may have trees of this shape while all sequences keep their
        slots: the slots are within its limit, and the pending prompt chunks fit its rounds."""
        rounds = self._rounds[tree]
        is_cut = not self._next_backlogs or rounds.max_committed >= self._current.max_committed
        return is_cut and self.num_slots <= rounds.sized.max_sequences

    @torch.inference_mode()
    def turn_to(self, tree: TreeShape) -> None:
        """Switches the next rounds to another tree shape, which must suit all placed sequences."""
        rounds, last = self._rounds[tree], self._last
        assert not self._slots.placed or self.takes(tree), "placed sequences do not fit the shape"
        has_fewer = last is not None and last.max_committed > rounds.max_committed
        if last is not None and has_fewer and self._slots.placed:
            self._catch_up()
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
        """Occupied slots of the next round."""
        return len(self._slots.taken)

    @property
    def num_slots(self) -> int:
        """Slots up to the last occupied one; slots of removed sequences stay empty."""
        return self._slots.num_used

    @property
    def num_pending(self) -> int:
        """Launched rounds whose results are unread."""
        return self._slots.num_pending

    @property
    def is_waited_for(self) -> bool:
        """Whether other ranks wait for a round that failed in this process."""
        leaders = (rounds.leader for rounds in self._rounds.values())
        return any(leader is not None and leader.is_waited_for for leader in leaders)

    @property
    def is_late(self) -> bool:
        """See `RoundHead.is_late`."""
        return self._head.is_late

    @property
    def announce_s(self) -> float:
        """Time by which a round has to be launched earlier, so that other processes that take part
        hear of it in time."""
        return max(self._place.announce_s, 0.0 if self._leader is None else _RANKS_S)

    @property
    def is_done(self) -> bool:
        """Whether the oldest unread round can be read without waiting."""
        return self._slots.oldest.result.is_done

    def num_computed(self, num_sequences: int) -> int:
        """Returns how many slots a round computes for `num_sequences` placed together."""
        return num_computed(num_sequences, self._head.state.num_slots)

    def capture(self, num_sequences: int, sampling: RoundSampling) -> None:
        """Captures the graphs of the current shape for a number of sequences in advance."""
        leader = self._current.leader
        with nullcontext() if leader is None else leader.capturing(num_sequences, sampling):
            self._current.graphs.make(num_sequences, sampling)

    def empty_round(self, num_sequences: int, sampling: RoundSampling) -> Callable[[], object]:
        """Returns a function that queues all kernels of a round of empty slots, without graphs."""
        return self._current.graphs.empty_round(num_sequences, sampling)

    def capture_prompts(self) -> None:
        """Captures the graphs with which the head computes missing rows, in the memory of all
        graphs that were captured before."""
        if self._memory is not None:
            self._head.capture_prompts(self._memory)

    def captured(self, num_sequences: int, sampling: RoundSampling) -> CapturedRound:
        """Returns the graphs of a round, for measurements of its parts."""
        return self._current.graphs.of(num_sequences, sampling)

    def run_empty(
        self, num_sequences: int, sampling: RoundSampling, *, is_ahead: bool = False
    ) -> None:
        """Queues a round of `num_sequences` empty slots; no sequence may be placed."""
        assert not self._slots.placed, "placed sequences would lose a round"
        self._head.begin(self._current.number, num_sequences, sampling, is_ahead=is_ahead)
        with self._queueing(num_sequences, sampling):
            self._current.graphs.grow(num_sequences, sampling)
            self._current.graphs.forward()
            self._current.graphs.commit(sampling)

    def num_kv_tokens(self, sequence_id: int) -> tuple[int, int]:
        """Returns how many tokens of a sequence the target's pages and the head's pages must cover
        for the next launch."""
        length = self.longest(sequence_id)
        return self.shape.num_kv_tokens(length), self.shape.num_head_kv_tokens(length)

    def longest(self, sequence_id: int) -> int:
        """Returns the most tokens of a sequence that may be committed once all rounds are read."""
        return self._slots.placed[sequence_id].longest

    def num_unread(self, sequence_id: int) -> int:
        """Returns the most tokens that unread rounds may commit to a sequence."""
        return self._slots.placed[sequence_id].num_pending

    @torch.inference_mode()
    def place(self, new_lanes: Sequence[NewLane]) -> None:
        """Adds sequences to the next round; the head first computes their missing rows, batched.

        Raises:
            torch.OutOfMemoryError: computing these rows does not fit the device's memory; the
                caller has to remove the sequences.
        """
        assert self._open is None, "graphs of prompts would overwrite the logits of the open round"
        slots = self._slots.take(new_lanes, self.shape.max_committed)
        computed = [lane for lane in new_lanes if not lane.reads_prompt]
        for lane in new_lanes:
            if lane.reads_prompt:
                self._next_backlogs[lane.sequence_id] = self._backlog(lane)
        if computed:
            self._head.catch_up(map(self._backlog, computed))
        self._slots.fill(slots)

    def _backlog(self, new_lane: NewLane) -> HeadBacklog:
        """Returns the rows that the head must compute before it grows the lane's first tree."""
        tokens, size = new_lane.token_ids, self.shape.max_committed
        num_open = len(cut(new_lane.uncomputed_token_ids, size)[-1])
        end = len(tokens) - (num_open if new_lane.reads_prompt else 2)
        slot = self._slots.placed[new_lane.sequence_id].slot
        pages = new_lane.pages, new_lane.head_pages
        return HeadBacklog(tuple(tokens), new_lane.num_head_rows, end, *pages, slot)

    def set_pages(self, sequence_id: int, pages: Sequence[int], head_pages: Sequence[int]) -> None:
        """Sets all pages of a placed sequence, which begin with the pages it has."""
        self._slots.set_pages(sequence_id, pages, head_pages)

    @torch.inference_mode()
    def remove(self, sequence_ids: Iterable[int]) -> None:
        """Removes sequences from the next launch on. Rounds under way may still write to their
        pages, before anything that is queued later."""
        removed = list(sequence_ids)
        for sequence_id in removed:
            self._backlogs.pop(sequence_id, None)
            self._next_backlogs.pop(sequence_id, None)
        self._slots.remove(removed)

    @property
    def awaits_masks(self) -> bool:
        """Whether a round was launched with masked lanes and waits for `finish`."""
        return self._open is not None

    @torch.inference_mode()
    def launch(self, masked: Iterable[int] = ()) -> None:
        """Queues one round of all placed sequences, whose pages must cover `num_kv_tokens`.

        Args:
            masked: sequences whose draws wait for masks. If there are any, the caller must call
                `finish`, after it has read the results of all earlier rounds.

        Raises:
            torch.OutOfMemoryError: the graphs for a new number of sequences or a new kind of
                sampling do not fit the device's memory; nothing was launched.
        """
        if self._grown is None:
            self._grow()
        grown, self._grown = self._grown, None
        assert grown is not None
        slots = {sequence_id: self._slots.placed[sequence_id].slot for sequence_id in masked}
        if slots:
            are_chains = self.shape.tree.topk == 1
            self._tree_copies.queue(self._current.graphs.grown, are_chains=are_chains)
        self._current.graphs.forward(grown.chunks)
        self._open = _OpenRound(grown, slots)
        if not slots:
            self.finish()

    def _grow(self) -> None:
        """Queues the first part of a round, which grows the trees of all placed sequences."""
        sequences = self._slots.placed.values()
        assert sequences, "no sequence is placed"
        assert self.num_pending < MAX_PENDING_ROUNDS, "read a result first"
        for placed in sequences:
            assert placed.length <= self._max_context_tokens, f"{placed.length} tokens"
        sampling = self._slots.sampling
        self._slots.write_pages()
        self._catch_up()
        chunks: RoundChunks | None = None
        if by_slot := self._slots.prompt_chunks:
            own = PromptChunks.of(by_slot, self.shape, self._device)
            chunks = own if self._group is None else SentChunks(own, self._group)
        number = self._current.number
        self._head.begin(number, self.num_slots, sampling, is_ahead=self.is_ahead)
        announced = ExitStack()
        announced.enter_context(
            self._queueing(self.num_slots, sampling, has_chunks=chunks is not None)
        )
        self._current.graphs.grow(self.num_slots, sampling)
        self._grown = _GrownRound(sampling, chunks, announced)

    def masked_trees(self) -> dict[int, LaneTree]:
        """Waits until the trees of masked lanes have grown; returns them by sequence."""
        opened = self._open
        assert opened is not None, "nothing was launched"
        assert opened.masked, "no lane is masked"
        trees = self._tree_copies.read(tuple(opened.masked.values()))
        return dict(zip(opened.masked, trees, strict=True))

    @torch.inference_mode()
    def finish(self, masks: LaneMasks | None = None) -> None:
        """Queues the draws and the commit of the launched round.

        Args:
            masks: masks of the trees of masked lanes, by sequence; None if none is left.

        Raises:
            torch.OutOfMemoryError: nothing was launched.
        """
        opened, self._open = self._open, None
        assert opened is not None, "nothing was launched"
        grown = opened.grown
        if masks is not None:
            slots = map(opened.masked.__getitem__, masks.rows)
            by_slot = dict(zip(slots, masks.rows.values(), strict=True))
            masks = LaneMasks(by_slot, masks.masks)
        output = self._current.graphs.commit(grown.sampling, self._slots.lanes, grown.chunks, masks)
        grown.announced.close()
        self._backlogs, self._next_backlogs = self._next_backlogs, {}
        self._slots.launched(output, self.shape.max_committed)
        self._last = self._current

    def result(self) -> tuple[SequenceRound, ...]:
        """See `RoundSlots.result`."""
        return self._slots.result()

    def _catch_up(self) -> None:
        """Has the head compute the prompts that the last launched round ended."""
        if self._backlogs:
            self._head.catch_up(self._backlogs.values())
            self._backlogs = {}

    def _queueing(
        self, num_slots: int, sampling: RoundSampling, *, has_chunks: bool = False
    ) -> AbstractContextManager[None]:
        """Announces to the decoder's other ranks, if any, that the body queues a round."""
        leader = self._current.leader
        if leader is None:
            return nullcontext()
        return leader.queueing(num_slots, sampling, has_chunks=has_chunks)
