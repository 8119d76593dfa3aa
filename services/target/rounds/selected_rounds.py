"""Sequences in rounds whose trees drafts pushed ahead and the device selects; their pages."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as SequenceOf
from contextlib import AbstractContextManager
from dataclasses import dataclass

from services.target.drafts.assignments import Assignment
from services.target.drafts.attachments import Attachments
from services.target.drafts.feature_store import FeatureStore
from services.target.draw import Decision
from services.target.rounds.device_rounds import MIN_SPARSE, masks_of, new_lane_of
from services.target.rounds.round_shapes import MAX_ROWS
from services.target.sequence import Sequence
from services.target.step_plan import ScheduledSequence, pruned
from services.target.step_report import Clock
from services.target.token_masks import TokenMasks
from shared.kv.leases import KvLeases
from shared.runtime.memory import Shortage
from shared.runtime.round_graphs import ROUND_SIZES
from shared.runtime.round_runner import RoundLimits
from shared.runtime.round_selection import Ending, PreparedTree
from shared.runtime.round_state import RoundSampling, SequenceRound
from shared.runtime.runner import ModelRunner
from shared.runtime.selection_runner import (
    PLAIN_SHAPE,
    SelectionRunner,
    covering_shape,
    covering_shape_of,
)
from shared.tokens import EMPTY_TREE, Candidate, TokenTree, TreeShape

logger = logging.getLogger(__name__)


class SelectedRounds:
    """Owned by the engine thread.

    Args:
        masks: computes those of lanes with a grammar or rules.

    Attributes:
        max_sequences: slots.
        store: of the features that rounds keep; None where they keep none.
    """

    def __init__(
        self, runner: ModelRunner, leases: KvLeases, limits: RoundLimits, masks: TokenMasks
    ) -> None:
        self._target, self._masks = runner, masks
        self._leases = leases
        self._limits = limits
        self.max_sequences = limits.max_sequences
        self._sequences: dict[int, Sequence] = {}
        self.store: FeatureStore | None = None
        self._runner = self._made(None)

    def turn_to(self, store: FeatureStore | None) -> None:
        """Has rounds keep the features of what they commit, or none; no sequence has a slot. Where
        there is no memory for that, none gets one any more."""
        assert not self._sequences, "sequences would stay behind"
        try:
            self._runner = self._made(store)
        except RuntimeError as error:
            self._confine(0, Shortage.of(error))
            return
        self.store = store

    def capture(self, tree: TreeShape) -> None:
        """Makes the graphs of rounds with trees of a shape, and of plain ones, for every number of
        sequences, so that none is made under traffic; those that do not fit the memory are left
        out. Takes seconds on a GPU."""
        for shape in (covering_shape_of(tree), PLAIN_SHAPE):
            for size in reversed(ROUND_SIZES):
                if shape is None or size * shape.num_draft_tokens > MAX_ROWS:
                    continue
                if size > self.max_sequences:
                    continue
                try:
                    self._runner.turn_to(shape)
                    for sampling in (RoundSampling.GREEDY, RoundSampling.DRAWN):
                        self._runner.capture(size, sampling)
                except RuntimeError as error:
                    self._confine(size - 1, Shortage.of(error))

    def _made(self, store: FeatureStore | None) -> SelectionRunner:
        return SelectionRunner(
            decoder=self._target.decoder,
            pool=self._target.pool,
            limits=self._limits,
            features=None if store is None else store.computed,
            feature_rows=None if store is None else store.rows,
        )

    @property
    def is_running(self) -> bool:
        """Whether sequences have slots, or results wait to be read."""
        return bool(self._sequences) or self.num_pending > 0

    @property
    def is_sparse(self) -> bool:
        """Whether so many have left that it pays to place those that are there anew."""
        used = self._runner.num_computed(self._runner.num_slots)
        needed = self._runner.num_computed(len(self._sequences))
        return used >= MIN_SPARSE and used >= 2 * needed

    @property
    def num_pending(self) -> int:
        """Rounds that are launched and not read."""
        return self._runner.num_pending

    @property
    def num_captured(self) -> int:
        """Graphs so far; a preparation that needs new ones takes long."""
        return self._runner.num_captured

    @property
    def is_done(self) -> bool:
        """Whether the oldest unread round can be read without waiting."""
        return self._runner.is_done

    @property
    def sequences(self) -> tuple[Sequence, ...]:
        """The sequences that have a slot."""
        return tuple(self._sequences.values())

    def holds(self, sequence: Sequence) -> bool:
        """Whether a sequence has a slot."""
        return sequence.sequence_id in self._sequences

    @property
    def num_free(self) -> int:
        """Slots that nobody has."""
        return self.max_sequences - len(self._sequences)

    def fits(self, sequence: Sequence) -> bool:
        """Whether a sequence is not too long."""
        return len(sequence.token_ids) <= self._limits.max_context_tokens

    def prepare(self, prepared: Mapping[Sequence, SequenceOf[PreparedTree]]) -> TreeShape | None:
        """Has the device choose the trees of the next round once the one under way has ended; see
        `SelectionRunner.prepare`. Sequences that are new to rounds get a slot.

        Returns:
            The shape of the round; None, with no tree prepared, where trees are too large, or pages
            or memory are missing. Sequences that have got a slot keep it.
        """
        wanted = covering_shape(each.tree for trees in prepared.values() for each in trees)
        new = [each for each in prepared if each.sequence_id not in self._sequences]
        # Before anyone gets a slot: this may be so in every step.
        if wanted is None or not self._has_room(prepared, len(new), wanted):
            return None
        self._place(new)
        shape = self._runner.made_shape(wanted)
        if shape != wanted and not self._has_room(prepared, 0, shape):
            return None
        for sequence in prepared:
            self._runner.set_pages(sequence.sequence_id, sequence.open_lease.pages, ())
        try:
            by_id = {sequence.sequence_id: trees for sequence, trees in prepared.items()}
            self._runner.prepare(by_id, shape)
        except RuntimeError as error:
            self._confine(len(self._sequences) - 1, Shortage.of(error))
            return None
        return shape

    def has_chosen(self) -> bool:
        """Waits for the round under way, and for the choice that was prepared for its end; whether
        any sequence takes part in the next one."""
        return self._runner.has_chosen()

    def launch(self) -> None:
        """Launches what was prepared. Where the host masks lanes, `finish` is to be called once the
        rounds before are read."""
        self._runner.launch(each.sequence_id for each in self.sequences if each.is_masked)

    @property
    def awaits_masks(self) -> bool:
        """Whether a round was launched whose draws wait for masks."""
        return self._runner.awaits_masks

    def finish(self) -> None:
        """Computes the masks for the trees of a round, beside the forward, and queues its draws.
        All rounds before are read: a grammar is followed up to the last token."""
        assert not self.num_pending, "the last tokens are not known"
        self._runner.finish(masks_of(self._runner, self.sequences, self._masks))

    def read(self, stores: Iterable[FeatureStore]) -> list[tuple[Sequence | None, SequenceRound]]:
        """Waits for the oldest unread round; returns what it did, with None in place of sequences
        that have ended since.

        Args:
            stores: of all features; all but one have holes from now on.
        """
        results = [(self._sequences.get(each.sequence_id), each) for each in self._runner.result()]
        for store in stores:
            slots = [slot for sequence, each in results for slot in self._slots(sequence, each)]
            if store is self.store:
                store.know(slots)
            else:
                store.forget(slots)
        return results

    def aside(self) -> AbstractContextManager[None]:
        """See `SelectionRunner.aside`."""
        return self._runner.aside()

    def leave(self) -> None:
        """Takes all sequences from their slots; every round has been read. They may come back."""
        assert self.num_pending == 0, "a round would be lost"
        self._runner.remove(self._sequences)
        self._sequences.clear()

    def evict(self, sequence: Sequence) -> None:
        """Takes a sequence from its slot; every round has been read."""
        assert self.num_pending == 0, "a round would be lost"
        self.forget(sequence)

    def forget(self, sequence: Sequence) -> None:
        """Lets go of a sequence that has ended. Whoever takes its pages next queues its work behind
        the rounds under way."""
        if self._sequences.pop(sequence.sequence_id, None) is not None:
            self._runner.remove([sequence.sequence_id])

    def _confine(self, max_sequences: int, shortage: Shortage) -> None:
        """No memory is left for rounds of more sequences."""
        self.max_sequences = max_sequences
        logger.warning(
            "no memory for rounds on the device of more than %d sequences that drafts push trees "
            "for; the host leads others: %s",
            *(max_sequences, self._target.cache.advice(shortage)),
        )

    def _has_room(self, sequences: Iterable[Sequence], num_new: int, shape: TreeShape) -> bool:
        """Whether so many rows are worth it, and the pages of sequences cover them."""
        num_slots = self._runner.num_computed(self._runner.num_slots + num_new)
        num_rows = num_slots * shape.num_draft_tokens
        return num_rows <= MAX_ROWS and all(self._has_pages(each, shape) for each in sequences)

    def _has_pages(self, sequence: Sequence, shape: TreeShape) -> bool:
        """Makes the pages cover the round; nobody is preempted for it."""
        longest = len(sequence.token_ids)
        if sequence.sequence_id in self._sequences:
            longest = self._runner.longest(sequence.sequence_id)
        return self._leases.try_grow(sequence.open_lease, longest - 1 + shape.num_draft_tokens)

    def _slots(self, sequence: Sequence | None, result: SequenceRound) -> list[int]:
        """Returns where the keys and values are that a round computed of committed tokens."""
        if sequence is None:
            return []
        start = len(sequence.token_ids) - 1
        end = start + len(result.token_ids)
        return sequence.open_lease.slots(start, end, self._leases.page_size)

    def _place(self, sequences: SequenceOf[Sequence]) -> None:
        for each in sequences:
            # Equal prompts need not wait for this one to end. A lane's pages are not replaced, as
            # sharing may do.
            self._leases.publish(each.open_lease, each.token_ids[: each.num_computed])
        if sequences:
            self._runner.place([new_lane_of(each) for each in sequences])
            self._sequences.update({each.sequence_id: each for each in sequences})


# The trees that the next round on the device may verify.


@dataclass(slots=True, eq=False)
class SelectedRound:
    """The host's record of a launched round.

    Attributes:
        trees: what is verified of each sequence that takes part, as far as that is known: of those
            that wait for the end of the round before, once that was read.
        offered: what was prepared for those.
        start_s: when it was launched.
        host_gap_s: how long the device had nothing to do before, because of the host.
    """

    trees: dict[int, TokenTree]
    offered: Mapping[int, tuple[Candidate, ...]]
    shape: TreeShape
    start_s: float
    host_gap_s: float


def conditional_trees(
    sequence: Sequence, verified: TokenTree, candidates: SequenceOf[Candidate]
) -> tuple[tuple[Candidate, PreparedTree], ...]:
    """Returns candidates for verdicts on a tree that is being verified, as the device takes them;
    not those for nodes that it does not have, or for verdicts that end the sequence, nor any behind
    an empty tree: its verdict names no candidate."""
    if not verified.token_ids:
        return ()
    depths = (0, *verified.depths)
    found: list[tuple[Candidate, PreparedTree]] = []
    for each in candidates:
        assert each.condition is not None
        node, bonus = each.condition.node_index, each.condition.bonus_token_id
        row = 0 if node is None else node + 1
        if row >= len(depths) or bonus in sequence.stop_token_ids:
            continue
        num_committed = depths[row] + 1
        if num_committed < sequence.num_remaining:
            num_tokens = len(sequence.token_ids) + num_committed
            found.append((each, PreparedTree(num_tokens, each.tree, Ending(row, bonus))))
    return tuple(found)


def as_step(
    sequence: Sequence, tree: TokenTree, result: SequenceRound
) -> tuple[ScheduledSequence, Decision]:
    """Returns a sequence's part of a round as if a step of the general path had done it, which
    leaves out what is beyond the end of the output."""
    tree, nodes = pruned(tree, sequence.num_remaining - 1)
    token_ids = result.token_ids[: sequence.num_remaining]
    entry = ScheduledSequence(sequence, sequence.num_computed, 1, tree, nodes, is_complete=True)
    logprobs = result.logprobs[: len(token_ids)]
    return entry, Decision(_accepted_nodes(tree, token_ids[:-1]), token_ids, logprobs)


def _accepted_nodes(tree: TokenTree, token_ids: SequenceOf[int]) -> tuple[int, ...]:
    """Returns the nodes that spell out tokens, the first one among siblings with one token."""
    path: list[int] = []
    nodes = enumerate(zip(tree.parent_indices, tree.token_ids, strict=True))
    for token_id in token_ids:
        # Children come behind their parents, so no node is looked at twice.
        wanted = (path[-1] if path else None, token_id)
        path.append(next(node for node, found in nodes if found == wanted))
    return tuple(path)


MIN_ALTERNATING = 16
"""Sequences from which on two rounds alternate; few rows take as long as half of them."""


@dataclass(slots=True, eq=False)
class NextTrees:
    """The trees prepared for the next round.

    Attributes:
        trees, offered: as of `SelectedRound`.
        hit_rates: how likely each sequence takes part.
    """

    prepared: dict[Sequence, tuple[PreparedTree, ...]]
    trees: dict[int, TokenTree]
    offered: dict[int, tuple[Candidate, ...]]
    hit_rates: list[float]

    @classmethod
    def none(cls) -> NextTrees:
        return cls({}, {}, {}, [])

    def add(self, sequence: Sequence, tree: TokenTree, *, num_tokens: int) -> None:
        """Prepares a tree that is verified whatever the round under way ends in."""
        self.prepared[sequence] = (PreparedTree(num_tokens, tree),)
        self.trees[sequence.sequence_id] = tree
        self.hit_rates.append(1.0)

    @property
    def sure(self) -> tuple[Sequence, ...]:
        """The sequences that certainly take part."""
        return tuple(each for each in self.prepared if each.sequence_id in self.trees)


class TreeForecast:
    """Looks at what drafts have pushed. Owned by the engine thread."""

    def __init__(self, attachments: Attachments, clock: Clock) -> None:
        self._assignments = attachments.assignments
        self._readiness = attachments.readiness
        self._clock = clock

    def is_any_here(self, lanes: Iterable[Sequence]) -> bool:
        """Whether a sequence has its tree, or no draft, unless it is under way."""
        found = map(self._assignment, lanes)
        return any(each is None or each.candidate is not None for each in found)

    def of_ready(self, lanes: SequenceOf[Sequence]) -> NextTrees:
        """Returns the trees, perhaps empty, of the sequences that wait for nothing, and none while
        they had better wait for others. None of them is under way.

        Of many only half are returned: the other half follows in a round behind theirs, and from
        then on drafts work for one half while the other is verified.
        """
        trees, now_s = NextTrees.none(), self._clock()
        if self._readiness.gather(lanes, now_s):
            return trees
        for sequence in self._half_of(lanes, lanes, now_s):
            self._join(sequence, trees, now_s)
        return trees

    def _half_of(
        self, lanes: SequenceOf[Sequence], free: Iterable[Sequence], now_s: float
    ) -> SequenceOf[Sequence]:
        """Returns those of `free` that wait for nothing; of those with trees that drafts grew for
        a verdict that had fallen, half of all lanes at most."""
        ready = [each for each in free if self._readiness.is_ready(each, now_s)]
        if len(lanes) < MIN_ALTERNATING:
            return ready
        left = {id(each) for each in list(filter(self._is_answered, ready))[-(-len(lanes) // 2) :]}
        return [each for each in ready if id(each) not in left]

    def _is_answered(self, sequence: Sequence) -> bool:
        """Whether a tree is here that its draft grew for the verdict before."""
        assignment = self._assignment(sequence)
        return bool(assignment and assignment.candidate and not assignment.is_announced)

    def is_complete(self, lanes: Iterable[Sequence], under_way: SelectedRound) -> bool:
        """Whether nothing is to come any more that decides on the round after this one, but its
        end."""
        return all(self._is_foreseen(each, under_way) for each in lanes)

    def after(self, lanes: SequenceOf[Sequence], under_way: SelectedRound) -> NextTrees:
        """Returns what is prepared for the end of a round, and hands it to the device: it stays as
        it is until the verdict. Sequences that are not in that round join as in `of_ready`."""
        trees, now_s = NextTrees.none(), self._clock()
        others = [each for each in lanes if each.sequence_id not in under_way.trees]
        if not self._readiness.gather(others, now_s):
            for sequence in self._half_of(lanes, others, now_s):
                self._join(sequence, trees, now_s)
        for sequence in lanes:
            verified = under_way.trees.get(sequence.sequence_id)
            if verified is not None and sequence.num_remaining > 1:
                self._foresee(sequence, verified, trees)
        return trees

    def _join(self, sequence: Sequence, trees: NextTrees, now_s: float) -> None:
        """A sequence that sits out takes part in the next round if it waits for nothing."""
        if self._readiness.is_ready(sequence, now_s):
            tree = self._assignments.tree(sequence)
            trees.add(sequence, tree, num_tokens=len(sequence.token_ids))

    def _foresee(self, sequence: Sequence, verified: TokenTree, trees: NextTrees) -> None:
        """Prepares for the ends of a sequence's part of the round under way."""
        assignment = self._assignment(sequence)
        if assignment is None or (assignment.is_idle and not verified.token_ids):
            # Without a tree the round brings it one token, whichever.
            trees.add(sequence, EMPTY_TREE, num_tokens=len(sequence.token_ids) + 1)
        elif assignment.is_announced:
            found = conditional_trees(sequence, verified, assignment.seal())
            if found:
                trees.prepared[sequence] = tuple(tree for _, tree in found)
                trees.offered[sequence.sequence_id] = tuple(each for each, _ in found)
                trees.hit_rates.append(assignment.attachment.outcomes.hit_rate)

    def _is_foreseen(self, sequence: Sequence, under_way: SelectedRound) -> bool:
        verified = under_way.trees.get(sequence.sequence_id)
        if verified is None or sequence.num_remaining == 1:
            return True
        assignment = self._assignment(sequence)
        if assignment is None or assignment.is_idle:
            return not verified.token_ids
        if not assignment.is_announced:
            # Its draft answers verdicts only, which is waited for unless the draft is silent, or
            # has to read a prompt first.
            return not (assignment.attachment.timeout.is_cold or assignment.is_excused)
        return assignment.has_pushed

    def _assignment(self, sequence: Sequence) -> Assignment | None:
        return self._assignments.get(sequence.sequence_id)
