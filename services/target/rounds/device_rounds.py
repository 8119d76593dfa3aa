"""Lanes: sequences that draft, verify and commit on the device, without the host. The head may be
in the process of a draft on this host, on a GPU of its own.

A draft in the target's process may share its head, see `RoundSource`. A sequence whose request a
round can serve gets a lane when its prompt is computed, and keeps it until it ends. All others, and
prompts, step beside the lanes.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field

from services.target.adaptive_config import MAX_DRAFT_TOKENS, AdaptiveConfig
from services.target.drafts.attachment import Attachment, DraftMessage
from services.target.drafts.feature_store import FeatureStore
from services.target.requests.request import GenerationRequest
from services.target.rounds.policy import CostTable
from services.target.rounds.round_shapes import (
    RoundShapes,
    RoundSource,
    capacities,
    prepared_kinds,
    round_sizes,
)
from services.target.sequence import Sequence
from services.target.token_masks import TokenMasks
from shared.kv.leases import KvLeases, OutOfPages, PagePool
from shared.runtime.mapped_rounds import (
    MappedCommand,
    MappedHead,
    MappedSource,
    PrepareMapped,
)
from shared.runtime.memory import Shortage
from shared.runtime.ring_memory import RingUnavailable
from shared.runtime.round_batches import RoundShape, SizedShape
from shared.runtime.round_runner import RoundLimits, RoundRunner
from shared.runtime.round_state import NewLane, SequenceRound
from shared.runtime.runner import ModelRunner
from shared.runtime.selection_runner import MAX_TREE_DEPTH, MAX_TREE_ROWS
from shared.speculation.row_masks import MaskedRows
from shared.tokens import TreeShape

logger = logging.getLogger(__name__)

# Rounds whose head is in the process of a draft on this host, on a GPU of its own.

# Their memory and graphs stay: a draft that was cut off may still write.
_MOST_KINDS = 2


def _is_small(tree: TreeShape) -> bool:
    return tree.num_draft_tokens <= MAX_TREE_ROWS and tree.num_steps <= MAX_TREE_DEPTH


@dataclass(slots=True)
class MappedRounds:
    """Rounds with a kind of head. Memory, graphs and times stay for the next draft of the kind.

    Attributes:
        store: the features that the head reads; None where it reads none.
        trees: most sequences of a round by shape, the draft's own shape first.
        is_pinned: an operator fixed the shape.
        place: see `RoundSource`.
        shapes: made when a draft was ready for the first time.
        costs: measured then.
    """

    head: MappedHead
    store: FeatureStore | None
    trees: dict[TreeShape, int]
    max_context_tokens: int
    is_pinned: bool
    place: int
    shapes: RoundShapes | None = None
    costs: CostTable | None = None

    def open(self, attachment: Attachment) -> None:
        """Has a draft map the memory and prepare for all sizes of rounds."""

        def send(commands: SequenceOf[MappedCommand]) -> bool:
            return attachment.port.send(DraftMessage((), (), (), commands=tuple(commands)))

        sizes = [
            (number, count, kind)
            for number, most in enumerate(self.trees.values())
            for count in reversed(round_sizes(most))
            for kind in prepared_kinds()
        ]
        self.head.open(send, [PrepareMapped(*each, each is sizes[-1]) for each in sizes])

    def source(self, pages: SequenceOf[int]) -> RoundSource:
        """Returns what rounds use of a draft that is ready.

        Args:
            pages: of the head's KV cache, for the rounds alone.
        """
        (tree, max_sequences), *others = self.trees.items()
        return RoundSource(
            head=self.head,
            pages=pages,
            tree=tree,
            max_context_tokens=self.max_context_tokens,
            max_sequences=max_sequences,
            other_trees=dict(others),
            is_pinned=self.is_pinned,
            place=self.place,
        )


@dataclass(slots=True)
class MappedHeads:
    """The mapped rounds of one engine, by the kind of their heads. Owned by the engine thread.

    Attributes:
        limits: None where no round stays on the device.
    """

    runner: ModelRunner
    limits: RoundLimits | None
    config: AdaptiveConfig
    _rounds: list[MappedRounds] = field(default_factory=list)

    def open(self, attachment: Attachment, store: FeatureStore | None) -> MappedRounds | None:
        """Begins to open rounds with the head of a draft that attached; None where there can be
        none."""
        offer, limits = attachment.mapped_offer, self.limits
        if offer is None or limits is None:
            return None
        if not _is_small(attachment.base_shape):
            return None
        context = min(offer.max_context_tokens, limits.max_context_tokens)
        base = attachment.base_shape
        shapes: tuple[TreeShape, ...] = (base,)
        if not offer.is_pinned:
            is_ahead = offer.num_outcomes > 0
            shapes = self.config.round_shapes(base, drafts_ahead=is_ahead)
        trees = capacities(shapes, limits.max_sequences)
        mapped = tuple(
            SizedShape(
                RoundShape.of(
                    tree,
                    draft_vocab_size=offer.vocab_size,
                    max_context_tokens=context,
                    num_outcomes=offer.num_outcomes,
                ),
                most,
            )
            for tree, most in trees.items()
        )
        source = MappedSource(offer.vocab_size, mapped)
        try:
            rounds = self._kept(source, store)
            if rounds is None and len(self._rounds) < _MOST_KINDS:
                rounds = self._made(source, store, trees, context, is_pinned=offer.is_pinned)
        except RingUnavailable as error:
            logger.warning("%s pushes its trees: %s", attachment.identity.worker_id, error)
            return None
        if rounds is not None:
            rounds.open(attachment)
        return rounds

    def _kept(self, source: MappedSource, store: FeatureStore | None) -> MappedRounds | None:
        for each in self._rounds:
            if each.head.source == source and each.store is store and not each.head.is_open:
                return each
        return None

    def _made(
        self,
        source: MappedSource,
        store: FeatureStore | None,
        trees: dict[TreeShape, int],
        context: int,
        *,
        is_pinned: bool,
    ) -> MappedRounds:
        head = MappedHead(
            source,
            None if store is None else store.computed,
            None if store is None else store.address,
            device=self.runner.device,
            page_size=self.runner.page_size,
            target_vocab_size=self.runner.decoder.config.vocab_size,
        )
        place = 1 + len(self._rounds)  # an embedded draft's is 0
        self._rounds.append(MappedRounds(head, store, trees, context, is_pinned, place))
        return self._rounds[-1]


@dataclass(slots=True)
class Lane:
    """The state that rounds keep of a running sequence.

    Attributes:
        head_pages: the head's, in logical order.
        num_head_rows: rows of the head that are computed.
    """

    sequence: Sequence
    head_pages: list[int] = field(default_factory=list)
    num_head_rows: int = 0

    @property
    def new_lane(self) -> NewLane:
        """What places it; the head lacks one row at least, from which a tree starts."""
        num_head_rows = min(self.num_head_rows, len(self.sequence.token_ids) - 2)
        return new_lane_of(self.sequence, self.head_pages, num_head_rows)

    def has_features(self, store: FeatureStore | None, page_size: int) -> bool:
        """Whether the features are there that the head has not read; the sequence takes no part."""
        if store is None:
            return True
        end = self.sequence.num_computed
        start = max(min(self.num_head_rows, end - 1), 0)
        return store.first_known(self.sequence.open_lease.slots(start, end, page_size)) == 0

    def grow(
        self, num_tokens: int, num_head_rows: int, leases: KvLeases, head_pages: PagePool
    ) -> bool:
        """Makes the pages cover target and head; nobody is preempted for it. False where there are
        not enough."""
        num_missing = -(-num_head_rows // leases.page_size) - len(self.head_pages)
        try:
            leases.grow(self.sequence.open_lease, num_tokens)
            if num_missing > 0:
                self.head_pages += head_pages.allocate(num_missing)
        except OutOfPages:
            return False
        return True


def new_lane_of(
    sequence: Sequence, head_pages: SequenceOf[int] = (), num_head_rows: int = 0
) -> NewLane:
    """Returns what gives a sequence its lane; without a head there is nothing to say of one."""
    return NewLane(
        sequence.sequence_id,
        sequence.token_ids,
        sequence.sampling,
        pages=sequence.open_lease.pages,
        head_pages=head_pages,
        num_head_rows=num_head_rows,
        num_computed=sequence.num_computed,
        num_prompt_tokens=sequence.num_prompt_tokens,
        min_length=sequence.num_prompt_tokens + sequence.request.stop.min_output_tokens,
        stop_token_ids=sequence.stop_token_ids,
        top_logprobs=sequence.request.top_logprobs,
        logprob_temperature=sequence.request.logprob_temperature,
    )


def can_be_round(
    request: GenerationRequest, algorithm: str, num_tree_rows: int = MAX_DRAFT_TOKENS
) -> bool:
    """Whether a draft of this algorithm can draft for the request in rounds, at any depth.

    They compute no trace, and verify whole trees of one shape.

    Args:
        num_tree_rows: that their trees have at most, the root included.
    """
    return (
        not request.speculation_disabled
        and not request.wants_trace
        and not request.wants_routes
        and not request.scores_shaped
        and not request.logprob_token_ids
        and request.draft_algorithm in (None, algorithm)
        and request.num_draft_steps is None
        and (request.num_draft_tokens or MAX_DRAFT_TOKENS) >= num_tree_rows
    )


def masks_of(
    runner: RoundRunner, lanes: Iterable[Sequence], masks: TokenMasks
) -> dict[int, MaskedRows]:
    """Returns the masks by sequence for the trees of a round whose draws wait for them.

    Args:
        lanes: all that are still there; the last token of each is known.
    """
    by_id = {each.sequence_id: each for each in lanes}
    trees = {
        sequence_id: each
        for sequence_id, each in runner.masked_trees().items()
        if sequence_id in by_id and by_id[sequence_id].is_masked
    }
    found = masks.of_lanes(
        [(by_id[sequence_id], each.tree) for sequence_id, each in trees.items()],
        runner.target_vocab_size,
    )
    return {
        sequence_id: MaskedRows(each.rows, own)
        for (sequence_id, each), own in zip(trees.items(), found, strict=True)
    }


MIN_SPARSE = 16
"""Slots below which empty ones cost next to nothing."""


class DeviceRounds:
    """Owned by the engine thread.

    Args:
        store: the features that the draft reads, one row a slot of the target's pool; None where
            it reads none.
        algorithm: the name of what the head does.
        masks: computes those of lanes with a grammar or rules.
        mapped: of a head in another process.

    Attributes:
        is_pinned: an operator fixed the shape.
    """

    def __init__(
        self,
        source: RoundSource,
        runner: ModelRunner,
        leases: KvLeases,
        store: FeatureStore | None,
        algorithm: str,
        masks: TokenMasks,
        mapped: MappedRounds | None = None,
    ) -> None:
        self._head, self._mapped = source.head, mapped
        self.store = store
        self.is_pinned = source.is_pinned
        self._algorithm = algorithm
        self._leases = leases
        self._cache = runner.cache
        self._head_pages = PagePool(source.pages)
        self._max_context_tokens = source.max_context_tokens
        kept = None if mapped is None else mapped.shapes
        self._shapes = kept or RoundShapes(source, runner, None if store is None else store.rows)
        if mapped is not None:
            mapped.shapes = self._shapes
        self._masks = masks
        # Chunks in several slots would be lanes without a state of their own.
        self._reads_prompts = runner.pool.states is None
        self._lanes: dict[int, Lane] = {}
        # Since the last launch.
        self._joined: list[Sequence] = []
        # Whether rounds can serve a request at all, by sequence.
        self._can_serve: dict[int, bool] = {}
        # At which of the leases' returns there was no room for a sequence.
        self._refused: dict[int, int] = {}

    @property
    def shape(self) -> TreeShape:
        """Shape of the trees that rounds have now."""
        return self._shapes.shape

    def shapes_for(self, num_sequences: int) -> tuple[TreeShape, ...]:
        """Returns the shapes that take so many sequences, the draft's own first."""
        return self._shapes.shapes_for(num_sequences)

    @property
    def shapes(self) -> tuple[TreeShape, ...]:
        """All shapes, the draft's own first."""
        return self._shapes.shapes

    def measured(self) -> CostTable:
        """Returns what steps of the lanes take on this device."""
        if self._mapped is None:
            return self._shapes.measured()
        if self._mapped.costs is None:
            costs = self._shapes.measured()
            if self.is_late:  # something was compiled, say
                self._head.forgive()
                costs = self._shapes.measured()
            self._mapped.costs = costs
        return self._mapped.costs

    def warmed_up(self) -> None:
        """What is late from now on counts."""
        self._head.warmed_up()

    @property
    def is_late(self) -> bool:
        """Whether trees did not come in time, so that sequences have to join anew."""
        return self._runner.is_late

    def forgive(self) -> None:
        """No sequence takes part: what was late does not count any more."""
        assert not self.is_running, "rows are missing in their heads' caches"
        self._head.forgive()

    def close(self) -> None:
        """The draft has left."""
        self._head.close()

    @property
    def is_sparse(self) -> bool:
        """Whether so many have left that it pays to place those that are there anew."""
        used = self._runner.num_computed(self._runner.num_slots)
        needed = self._runner.num_computed(self._runner.num_placed)
        return used >= MIN_SPARSE and used >= 2 * needed

    def turn_to(self, shape: TreeShape) -> None:
        """Gives the rounds from now on trees of another shape; every round has been read, unless
        sequences keep their lanes."""
        if not self.keeps_lanes(shape):
            self.leave()
        self._shapes.turn_to(shape)

    def keeps_lanes(self, shape: TreeShape) -> bool:
        """Whether sequences stay where they are when rounds turn to a shape."""
        return self._shapes.keeps_lanes(shape)

    @property
    def _runner(self) -> RoundRunner:
        return self._shapes.runner

    @property
    def is_running(self) -> bool:
        """Whether sequences take part, or results wait to be read."""
        return bool(self._runner.sequence_ids) or self._runner.num_pending > 0

    def suits(self, sequence: Sequence) -> bool:
        """Whether rounds can do all that the request asks for, and its context is not too long."""
        sequence_id = sequence.sequence_id
        can_serve = self._can_serve.get(sequence_id)
        if can_serve is None:
            rows = self._shapes.max_tree_rows
            can_serve = can_be_round(sequence.request, self._algorithm, rows)
            self._can_serve[sequence_id] = can_serve
        if not can_serve or sequence.prediction is not None:
            return False
        if len(sequence.token_ids) > self._max_context_tokens:
            return False
        # Where there was no room, there may be some once pages have come free.
        return self._refused.get(sequence_id) != self._leases.num_returns

    def holds(self, sequence: Sequence) -> bool:
        """Whether a sequence has a lane."""
        return self._runner.holds(sequence.sequence_id)

    @property
    def sequences(self) -> list[Sequence]:
        """The sequences that have a lane."""
        return [self._lanes[each].sequence for each in self._runner.sequence_ids]

    @property
    def num_placed(self) -> int:
        """Number of sequences that have a lane."""
        return self._runner.num_placed

    @property
    def num_free(self) -> int:
        """Lanes that nobody has, and in which the next round reads no prompt."""
        return self._shapes.capacity - self._runner.num_taken

    def num_slots_to_read(self, sequence: Sequence) -> int:
        """Returns how many slots of a round compute what is left of a sequence's prompt, up to its
        last token; 0 where steps have to."""
        count = sequence.num_uncomputed
        is_read = count > 1 and sequence.num_computed > 0 and sequence.num_pending == 0
        if not self._reads_prompts or not is_read or sequence.is_scoring:
            return 0
        # Their penalties would count the prompt as output, their masks are those of trees.
        if sequence.is_masked or new_lane_of(sequence).is_shaped:
            return 0
        return -(-count // self._runner.shape.max_committed)

    def join(self, joining: SequenceOf[Sequence]) -> None:
        """Gives lanes to sequences whose last tokens are read; those before are computed, or can be
        read by the next round. Who has no room is refused."""
        for each in joining:
            # Equal prompts need not wait for this one to end. A lane's pages are not replaced, as
            # sharing may do.
            self._leases.publish(each.open_lease, each.token_ids[: each.num_computed])
        new = [each for each in joining if self._has_room(each)]
        if not new:
            return
        self._joined += new
        try:
            self._runner.place([self._lanes[each.sequence_id].new_lane for each in new])
        except RuntimeError as error:
            if self._runner.is_waited_for:
                raise
            # What the head has to catch up with does not fit beside weights and cache; fewer
            # sequences may.
            self._give_up(Shortage.of(error))

    @property
    def has_joined(self) -> bool:
        """Whether sequences have got their lanes since the last launch."""
        return any(map(self.holds, self._joined))

    def launch(self) -> bool:
        """Launches a round of all lanes.

        Where the host masks lanes, `finish` is to be called once the rounds before are read.

        False, with nothing launched, where a sequence outgrows its lane or its pages while rounds
        are unread: they have to be read first.
        """
        lacking = [each for each in self.sequences if not self._may_go_on(each)]
        if lacking and self.num_pending:
            return False
        for each in lacking:
            self.evict(each)
        placed = self.sequences
        if not placed:
            return True
        for sequence in placed:
            sequence_id = sequence.sequence_id
            head_pages = self._lanes[sequence_id].head_pages
            self._runner.set_pages(sequence_id, sequence.open_lease.pages, head_pages)
        try:
            self._runner.launch(each.sequence_id for each in placed if each.is_masked)
        except RuntimeError as error:
            if self._runner.is_waited_for:
                raise
            # Graphs of this size do not fit beside weights and cache; those of fewer may.
            if not self.has_joined and self.num_pending:
                return False
            self._give_up(Shortage.of(error))
        self._joined.clear()
        return True

    @property
    def awaits_masks(self) -> bool:
        """Whether a round was launched whose draws wait for masks."""
        return self._runner.awaits_masks

    def finish(self) -> None:
        """Computes the masks for the trees of a round, beside the forward, and queues its draws.
        All rounds before are read: a grammar is followed up to the last token."""
        assert not self.num_pending, "the last tokens are not known"
        try:
            self._runner.finish(masks_of(self._runner, self.sequences, self._masks))
        except RuntimeError as error:
            if self._runner.is_waited_for:
                raise
            self._give_up(Shortage.of(error))

    def evict(self, sequence: Sequence) -> None:
        """Takes a lane from a sequence; every round has been read."""
        assert self.num_pending == 0, "a round would be lost"
        self._runner.remove([sequence.sequence_id])

    def _may_go_on(self, sequence: Sequence) -> bool:
        return len(sequence.token_ids) <= self._max_context_tokens and self._has_room(sequence)

    def _give_up(self, shortage: Shortage) -> None:
        """No memory for so many lanes, or for sequences to join them: those who came since the last
        launch leave, or all where nobody came."""
        self._shapes.confine(max(self._runner.num_placed, 1), shortage)
        placed = self.sequences
        leaving = [each for each in self._joined if self.holds(each)] or placed
        for each in leaving:
            self._refuse(each)
        self._runner.remove(each.sequence_id for each in leaving)

    @property
    def num_pending(self) -> int:
        """Rounds that are launched and not read."""
        return self._runner.num_pending

    @property
    def is_done(self) -> bool:
        """Whether the oldest unread round can be read without waiting."""
        return self._runner.is_done

    @property
    def num_lanes(self) -> int:
        """Sequences of the oldest unread round, those that have ended since included."""
        return self._runner.num_awaited

    def num_unread(self, sequence: Sequence) -> int:
        """Returns how many tokens the rounds that nobody has read may commit to a lane."""
        return self._runner.num_unread(sequence.sequence_id)

    @property
    def num_tree_rows(self) -> int:
        """Rows that the target computes for a sequence."""
        return self._runner.shape.num_tree_rows

    def read(self) -> list[tuple[Sequence, SequenceRound]]:
        """Waits for the oldest unread round; returns what it did to sequences still running."""
        found: list[tuple[Sequence, SequenceRound]] = []
        slots: list[int] = []
        for each in self._runner.result():
            lane = self._lanes.get(each.sequence_id)
            if lane is None:
                continue
            start, num_tokens = lane.sequence.num_computed, len(lane.sequence.token_ids)
            if start == num_tokens - 1 and not self.is_late:
                # The round began with computing every row that was open.
                lane.num_head_rows = start
            end = num_tokens - 1 + len(each.token_ids)
            slots += lane.sequence.open_lease.slots(start, end, self._leases.page_size)
            found.append((lane.sequence, each))
        if self.store is not None:
            self.store.know(slots)
        return found

    def leave(self) -> None:
        """Ends taking part for all; every round has been read. They may come back."""
        assert self._runner.num_pending == 0, "a round would be lost"
        self._runner.remove(self._runner.sequence_ids)

    def forget(self, sequence: Sequence) -> None:
        """Lets go of a sequence that has ended."""
        self._can_serve.pop(sequence.sequence_id, None)
        self._refused.pop(sequence.sequence_id, None)
        lane = self._lanes.pop(sequence.sequence_id, None)
        if lane is None:
            return
        if self._runner.holds(sequence.sequence_id):
            self._runner.remove([sequence.sequence_id])
        # Whoever takes these pages next queues its work behind the rounds under way.
        self._head_pages.release(lane.head_pages)

    def _has_room(self, sequence: Sequence) -> bool:
        """Makes room for a sequence's part of the next round; False when that cannot be."""
        sequence_id = sequence.sequence_id
        lane = self._lanes.setdefault(sequence_id, Lane(sequence))
        if self._runner.holds(sequence_id):
            has_features, needed = True, self._runner.num_kv_tokens(sequence_id)
        else:
            num_tokens, shape = len(sequence.token_ids), self._runner.shape
            needed = shape.num_kv_tokens(num_tokens), shape.num_head_kv_tokens(num_tokens)
            has_features = lane.has_features(self.store, self._leases.page_size)
        if has_features and lane.grow(*needed, self._leases, self._head_pages):
            return True
        self._refuse(sequence)
        return False

    def _refuse(self, sequence: Sequence) -> None:
        self._refused[sequence.sequence_id] = self._leases.num_returns
