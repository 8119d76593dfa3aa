"""Lanes: sequences whose rounds run on the device back to back, with trees of any source.

A sequence whose request rounds can serve gets a lane when its prompt is computed, and keeps it
until it ends. All other sequences, and prompts, take planned steps beside the rounds.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

from services.target.adaptive_config import MAX_DRAFT_TOKENS
from services.target.drafts.feature_store import FeatureFeed, FeatureStore
from services.target.requests.request import GenerationRequest
from services.target.sequence import Sequence
from services.target.token_masks import TokenMasks
from shared.kv.leases import KvLease, KvLeases
from shared.runtime.lane_sampling import LaneMasks
from shared.runtime.round_runner import RoundRunner
from shared.runtime.round_state import NewLane, SequenceRound

MIN_SPARSE = 16
"""With fewer slots than this, empty slots cost next to nothing."""


@dataclass(slots=True)
class Lane:
    """The state that rounds keep of a running sequence.

    Attributes:
        head_lease: KV pages of the head; None where rounds have no head, and until they take the
            sequence.
        num_head_rows: computed rows of the head.
    """

    sequence: Sequence
    head_lease: KvLease | None = None
    num_head_rows: int = 0

    @property
    def head_pages(self) -> SequenceOf[int]:
        """The head's KV pages, in logical order."""
        return () if self.head_lease is None else self.head_lease.pages

    @property
    def new_lane(self) -> NewLane:
        """The description with which the runner places it. The head lacks at least one row, from
        which a tree starts."""
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

    Rounds compute no trace, and verify whole trees of one shape.

    Args:
        num_tree_rows: most rows of a tree, the root included.
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
        features: stores of features, in which the rows that rounds store or overwrite are marked.
        masks: computes the masks of lanes with a grammar or rules.
        max_context_tokens: longest sequence that a round may start from.
        store: where rounds store the features of committed tokens; None if they store none.
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
        # All sequences that have had a lane and have not ended, by id.
        self._lanes: dict[int, Lane] = {}

    @property
    @abstractmethod
    def runner(self) -> RoundRunner:
        """The runner of the rounds."""

    @property
    @abstractmethod
    def capacity(self) -> int:
        """Most sequences that may have a lane now."""

    @abstractmethod
    def _give_up(self, error: RuntimeError) -> None:
        """Takes lanes away from sequences, after a round that was queued in part ran out of
        memory."""

    @property
    def is_running(self) -> bool:
        """Whether sequences have lanes, or results wait to be read."""
        return self.runner.num_placed > 0 or self.num_pending > 0

    @property
    def is_sparse(self) -> bool:
        """Whether so many slots are empty that it pays to place the remaining sequences anew."""
        used = self.runner.num_computed(self.runner.num_slots)
        needed = self.runner.num_computed(self.runner.num_placed)
        return used >= MIN_SPARSE and used >= 2 * needed

    @property
    def num_pending(self) -> int:
        """Rounds in flight: launched and not read."""
        return self.runner.num_pending

    @property
    def sequences(self) -> list[Sequence]:
        """The sequences that have a lane."""
        return [self._lanes[sequence_id].sequence for sequence_id in self.runner.sequence_ids]

    def holds(self, sequence: Sequence) -> bool:
        """Whether a sequence has a lane."""
        return self.runner.holds(sequence.sequence_id)

    @property
    def num_free(self) -> int:
        """Lanes that no sequence has, and in which the next round computes no prompt."""
        return self.capacity - self.runner.num_taken

    def fits(self, sequence: Sequence) -> bool:
        """Whether a sequence is short enough."""
        return len(sequence.token_ids) <= self._max_context_tokens

    def launch(self) -> bool:
        """Launches a round of all lanes.

        If any lane is masked, `finish` has to be called once the earlier rounds are read.

        Returns:
            False, with nothing launched, where unread rounds have to be read first.
        """
        try:
            self._queue(self.sequences)
        except RuntimeError as error:
            if self.num_pending:
                return False
            self._give_up(error)
        return True

    def _queue(self, sequences: SequenceOf[Sequence]) -> None:
        """Queues a round of all lanes; if any lane is masked, only up to its draws."""
        self.runner.launch(s.sequence_id for s in sequences if s.is_masked)

    def finish(self) -> None:
        """Computes the masks for the trees of a round, during the forward, and queues its draws.
        All earlier rounds have been read, because a grammar has to follow every token."""
        assert not self.num_pending, "the last tokens are not known"
        try:
            self.runner.finish(self._tree_masks())
        except RuntimeError as error:
            self._give_up(error)

    def read(self) -> list[tuple[Sequence | None, SequenceRound]]:
        """Waits for the oldest unread round and returns its results, with None in place of
        sequences that have ended since. Marks its rows as missing in stores that it did not fill.
        """
        read: list[tuple[Sequence | None, SequenceRound]] = []
        slots: list[int] = []
        results, is_late = self.runner.result(), self.runner.is_late
        for result in results:
            lane = self._lanes.get(result.sequence_id)
            read.append((None if lane is None else lane.sequence, result))
            if lane is None:
                continue
            start, num_tokens = lane.sequence.num_computed, len(lane.sequence.token_ids)
            if start == num_tokens - 1 and not is_late:
                # The round began by computing all rows that the head lacked.
                lane.num_head_rows = start
            end = num_tokens - 1 + len(result.token_ids)
            slots += lane.sequence.open_lease.slots(start, end, self._leases.page_size)
        for store in self._features.stores:
            (store.mark_stored if store is self.store else store.mark_missing)(slots)
        return read

    def leave(self) -> None:
        """Takes their lanes from all sequences. All rounds have been read. Sequences may come
        back."""
        assert not self.num_pending, "a round would be lost"
        self.runner.remove(self.runner.sequence_ids)

    def evict(self, sequence: Sequence) -> None:
        """Takes the lane of a sequence. All rounds have been read."""
        assert not self.num_pending, "a round would be lost"
        self.runner.remove([sequence.sequence_id])

    def forget(self, sequence: Sequence) -> None:
        """Releases a sequence that has ended. Work that uses its pages next is queued behind the
        rounds in flight."""
        if self._lanes.pop(sequence.sequence_id, None) is not None and self.holds(sequence):
            self.runner.remove([sequence.sequence_id])

    def _place(self, sequences: SequenceOf[Sequence]) -> None:
        """Gives lanes to sequences for which there is room."""
        for sequence in sequences:
            # Published now, so that equal prompts can share the pages before the sequence ends, and
            # because publishing may replace pages, which must not happen to those of a lane.
            computed = sequence.token_ids[: sequence.num_computed]
            self._leases.publish(sequence.open_lease, computed)
        if sequences:
            self.runner.place([self._lane(sequence).new_lane for sequence in sequences])

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

    def _tree_masks(self) -> LaneMasks | None:
        """Returns the masks by sequence for the trees of the round whose draws wait for them."""
        masked = [
            (lane.sequence, lane_tree)
            for sequence_id, lane_tree in self.runner.masked_trees().items()
            if self.runner.holds(sequence_id)
            and (lane := self._lanes[sequence_id]).sequence.is_masked
        ]
        if not masked:
            return None
        masks = self._masks.of_trees(
            [(sequence, lane_tree.tree) for sequence, lane_tree in masked],
            self.runner.target_vocab_size,
            self.runner.mask_memory,
        )
        rows = {sequence.sequence_id: lane_tree.rows for sequence, lane_tree in masked}
        return LaneMasks(rows, masks)
