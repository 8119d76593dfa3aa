"""Lanes: sequences whose rounds run on the device, one behind another, whoever grows their trees.

A sequence whose request rounds can serve gets a lane when its prompt is computed, and keeps it
until it ends. All others, and prompts, step beside the lanes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field

from services.target.adaptive_config import MAX_DRAFT_TOKENS
from services.target.drafts.feature_store import FeatureFeed, FeatureStore
from services.target.requests.request import GenerationRequest
from services.target.sequence import Sequence
from services.target.token_masks import TokenMasks
from shared.kv.leases import KvLeases
from shared.runtime.round_runner import RoundRunner
from shared.runtime.round_state import NewLane, SequenceRound
from shared.speculation.row_masks import MaskedRows

MIN_SPARSE = 16
"""Slots below which empty ones cost next to nothing."""


@dataclass(slots=True)
class Lane:
    """The state that rounds keep of a running sequence.

    Attributes:
        head_pages: of a head, in logical order.
        num_head_rows: rows of a head that are computed.
    """

    sequence: Sequence
    head_pages: list[int] = field(default_factory=list)
    num_head_rows: int = 0

    @property
    def new_lane(self) -> NewLane:
        """What places it; a head lacks one row at least, from which a tree starts."""
        sequence = self.sequence
        return NewLane(
            sequence.sequence_id,
            sequence.token_ids,
            sequence.sampling,
            pages=sequence.open_lease.pages,
            head_pages=self.head_pages,
            num_head_rows=min(self.num_head_rows, len(sequence.token_ids) - 2),
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


class RoundLanes(ABC):
    """The sequences of one `RoundRunner`. Owned by the engine thread.

    Args:
        features: marks those that rounds keep.
        masks: computes those of lanes with a grammar or rules.
        max_context_tokens: longest sequence that a round may start from.
        store: where rounds keep the features of what they commit; None where they keep none.
    """

    def __init__(
        self,
        leases: KvLeases,
        features: FeatureFeed,
        masks: TokenMasks,
        max_context_tokens: int,
        store: FeatureStore | None = None,
    ) -> None:
        self._leases, self._features, self._masks, self.store = leases, features, masks, store
        self._max_context_tokens = max_context_tokens
        # Of all that have been placed and not ended.
        self._lanes: dict[int, Lane] = {}

    @property
    @abstractmethod
    def runner(self) -> RoundRunner:
        """Runs the rounds."""

    @property
    @abstractmethod
    def capacity(self) -> int:
        """Most sequences that may have a lane now."""

    @abstractmethod
    def _give_up(self, error: RuntimeError) -> None:
        """A round that was queued in part does not fit the memory: who has to leaves."""

    @property
    def is_running(self) -> bool:
        """Whether sequences have lanes, or results wait to be read."""
        return self.runner.num_placed > 0 or self.num_pending > 0

    @property
    def is_sparse(self) -> bool:
        """Whether so many have left that it pays to place those that are there anew."""
        used = self.runner.num_computed(self.runner.num_slots)
        needed = self.runner.num_computed(self.runner.num_placed)
        return used >= MIN_SPARSE and used >= 2 * needed

    @property
    def num_pending(self) -> int:
        """Rounds that are launched and not read."""
        return self.runner.num_pending

    @property
    def sequences(self) -> list[Sequence]:
        """The sequences that have a lane."""
        return [self._lanes[each].sequence for each in self.runner.sequence_ids]

    def holds(self, sequence: Sequence) -> bool:
        """Whether a sequence has a lane."""
        return self.runner.holds(sequence.sequence_id)

    @property
    def num_free(self) -> int:
        """Lanes that nobody has, and in which the next round reads no prompt."""
        return self.capacity - self.runner.num_taken

    def fits(self, sequence: Sequence) -> bool:
        """Whether a sequence is not too long."""
        return len(sequence.token_ids) <= self._max_context_tokens

    def launch(self) -> bool:
        """Launches a round of all lanes.

        Where the host masks lanes, `finish` is to be called once the rounds before are read.

        False, with nothing launched, where rounds that are unread have to be read first.
        """
        try:
            self._queue(self.sequences)
        except RuntimeError as error:
            if self.num_pending:
                return False
            self._give_up(error)
        return True

    def _queue(self, sequences: SequenceOf[Sequence]) -> None:
        """Queues a round of all lanes, up to its draws where any are masked."""
        self.runner.launch(each.sequence_id for each in sequences if each.is_masked)

    def finish(self) -> None:
        """Computes the masks for the trees of a round, beside the forward, and queues its draws.
        All rounds before are read: a grammar is followed up to the last token."""
        assert not self.num_pending, "the last tokens are not known"
        try:
            self.runner.finish(self._tree_masks())
        except RuntimeError as error:
            self._give_up(error)

    def read(self) -> list[tuple[Sequence | None, SequenceRound]]:
        """Waits for the oldest unread round; returns what it did, with None in place of sequences
        that have ended since. Features that it did not keep have holes from now on."""
        found: list[tuple[Sequence | None, SequenceRound]] = []
        slots: list[int] = []
        results, is_late = self.runner.result(), self.runner.is_late
        for each in results:
            lane = self._lanes.get(each.sequence_id)
            found.append((None if lane is None else lane.sequence, each))
            if lane is None:
                continue
            start, num_tokens = lane.sequence.num_computed, len(lane.sequence.token_ids)
            if start == num_tokens - 1 and not is_late:
                # The round began with computing every row that was open.
                lane.num_head_rows = start
            end = num_tokens - 1 + len(each.token_ids)
            slots += lane.sequence.open_lease.slots(start, end, self._leases.page_size)
        for store in self._features.stores:
            (store.know if store is self.store else store.forget)(slots)
        return found

    def leave(self) -> None:
        """Takes all lanes; every round has been read. Sequences may come back."""
        assert not self.num_pending, "a round would be lost"
        self.runner.remove(self.runner.sequence_ids)

    def evict(self, sequence: Sequence) -> None:
        """Takes a lane from a sequence; every round has been read."""
        assert not self.num_pending, "a round would be lost"
        self.runner.remove([sequence.sequence_id])

    def forget(self, sequence: Sequence) -> None:
        """Lets go of a sequence that has ended. Whoever takes its pages next queues its work behind
        the rounds under way."""
        if self._lanes.pop(sequence.sequence_id, None) is not None and self.holds(sequence):
            self.runner.remove([sequence.sequence_id])

    def _place(self, sequences: SequenceOf[Sequence]) -> None:
        """Gives sequences that have room their lanes."""
        for each in sequences:
            # Equal prompts need not wait for this one to end. A lane's pages are not replaced, as
            # sharing may do.
            self._leases.publish(each.open_lease, each.token_ids[: each.num_computed])
        if sequences:
            self.runner.place([self._lane(each).new_lane for each in sequences])

    def _lane(self, sequence: Sequence) -> Lane:
        lane = self._lanes.get(sequence.sequence_id)
        if lane is None:
            lane = self._lanes[sequence.sequence_id] = Lane(sequence)
        return lane

    def _length(self, sequence: Sequence) -> int:
        """Returns the most tokens of a sequence once all rounds are read."""
        if self.holds(sequence):
            return self.runner.longest(sequence.sequence_id)
        return len(sequence.token_ids)

    def _tree_masks(self) -> dict[int, MaskedRows]:
        """Returns the masks by sequence for the trees of the round whose draws wait for them."""
        masked = [
            (self._lanes[sequence_id].sequence, each)
            for sequence_id, each in self.runner.masked_trees().items()
            if self.runner.holds(sequence_id)
        ]
        masked = [(sequence, each) for sequence, each in masked if sequence.is_masked]
        words = self._masks.of_lanes(
            [(sequence, each.tree) for sequence, each in masked], self.runner.target_vocab_size
        )
        return {
            sequence.sequence_id: MaskedRows(each.rows, own)
            for (sequence, each), own in zip(masked, words, strict=True)
        }
