"""The sequences that the draft holds, by link. No torch, no threads, no grpc."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Container, Iterator, Sequence
from typing import assert_never

from services.draft.drafters.drafter import Drafter
from services.draft.events import (
    FeaturesArrived,
    LinkClosed,
    LinkOpened,
    LinkTerms,
    Output,
    Probe,
    ProbeDone,
    RoundResult,
    RoundsDecided,
    SequenceEvent,
    SequencesClosed,
    SequencesOpened,
    SequencesReleased,
    WeightsUpdated,
)
from services.draft.metrics import DraftRecorder
from services.draft.sequence import DraftSequence, SequenceKey
from shared.tokens import OpenedSequence, Outcome, TreeShape

log = logging.getLogger(__name__)


class SequenceTable:
    """Sequences of every link, least recently used first.

    Attributes:
        due: sequences whose target waits for a candidate, in the order they became due.
        unprepared: sequences with an in-flight tree for whose verdicts nothing is prepared yet.
        recorder: records openings, proposals and endings.
    """

    def __init__(
        self,
        drafter: Drafter,
        *,
        max_sequences: int,
        deliver: Callable[[Output], None],
        recorder: DraftRecorder | None = None,
    ) -> None:
        self.due: dict[SequenceKey, DraftSequence] = {}
        self.unprepared: dict[SequenceKey, DraftSequence] = {}
        self.recorder = recorder or DraftRecorder()
        self._drafter = drafter
        self._vocab_size = drafter.limits.vocab_size
        self._max_sequences = max_sequences
        self._deliver = deliver
        self._links: dict[int, LinkTerms] = {}
        self._sequences: OrderedDict[SequenceKey, DraftSequence] = OrderedDict()

    def __len__(self) -> int:
        return len(self._sequences)

    @property
    def is_serving(self) -> bool:
        """Whether any target has a sequence here."""
        return any(not sequence.is_probe for sequence in self._sequences.values())

    @property
    def links(self) -> tuple[int, ...]:
        """Links to targets and links of probes."""
        return tuple(self._links)

    def terms(self, link: int) -> LinkTerms | None:
        """Returns the target's terms of a link; None where there is no such link."""
        return self._links.get(link)

    @property
    def candidate_shapes(self) -> tuple[TreeShape, ...]:
        """The shapes that targets may request trees in, without duplicates."""
        shapes = (shape for terms in self._links.values() for shape in terms.shapes)
        return tuple(dict.fromkeys(shapes))

    def apply(self, event: SequenceEvent) -> None:
        """Applies one event; computes nothing. An event or result that names an unknown link or
        sequence is dropped: it crossed a release or a close on the wire."""
        match event:
            case LinkOpened():
                self._links[event.link] = event.terms
            case LinkClosed():
                self._links.pop(event.link, None)
                for key in [key for key in self._sequences if key.link == event.link]:
                    self.close(key)
            case SequencesOpened():
                self._open_all(event)
            case RoundsDecided():
                for result in event.results:
                    self._decide(SequenceKey(event.link, result.verdict.sequence_id), result)
            case FeaturesArrived():
                key = SequenceKey(event.link, event.sequence_id)
                if key in self._sequences:
                    self._drafter.add_features(self._sequences[key], event.rows)
            case SequencesClosed():
                for sequence_id in event.sequence_ids:
                    self.close(SequenceKey(event.link, sequence_id))
            case WeightsUpdated():
                self._drafter.retire_prefix_cache()
            case _:
                assert_never(event)

    def close(self, key: SequenceKey) -> None:
        """Frees a sequence; does nothing for an unknown key."""
        sequence = self._sequences.pop(key, None)
        if sequence is not None:
            self.due.pop(key, None)
            self.unprepared.pop(key, None)
            self._drafter.close(sequence)
            self.recorder.closed(sequence)

    def release(self, sequence: DraftSequence) -> None:
        """Gives a sequence back to its target, which then decodes it without candidates."""
        self.recorder.counters.num_released += 1
        self.close(sequence.key)
        link, sequence_id = sequence.key.link, sequence.key.sequence_id
        if sequence.is_probe:
            self._deliver(ProbeDone(link, None, sequence.draft_s))
        else:
            self._deliver(SequencesReleased(link, (sequence_id,)))

    def least_recently_used(self, *, spared: Container[SequenceKey]) -> DraftSequence | None:
        """Returns the sequence to evict first; never a spared one, never a probe."""
        for key, sequence in self._sequences.items():
            if key not in spared and not sequence.is_probe:
                return sequence
        return None

    def holds(self, sequence: DraftSequence) -> bool:
        return sequence.key in self._sequences

    def behind(self, num_tokens: int) -> Iterator[DraftSequence]:
        """Yields the sequences whose backlog is over `num_tokens`, longest unused first."""
        for sequence in self._sequences.values():
            if self._drafter.backlog(sequence) > num_tokens:
                yield sequence

    def _open_all(self, event: SequencesOpened) -> None:
        terms = self._links.get(event.link)
        if terms is None:
            return
        refused = [o.sequence_id for o in event.openings if not self._open(event.link, terms, o)]
        if refused:
            self._deliver(SequencesReleased(event.link, tuple(refused)))

    def _open(self, link: int, terms: LinkTerms, opening: OpenedSequence) -> bool:
        """Opens a sequence; returns False where it is refused."""
        key = SequenceKey(link, opening.sequence_id)
        # An id that is open already is a bug of the target: both sequences are released.
        was_held = key in self._sequences
        self.close(key)
        num_on_link = sum(1 for held in self._sequences if held.link == link)
        is_full = len(self) >= self._max_sequences or num_on_link >= terms.max_sequences
        if was_held or is_full or not self._are_valid(opening.token_ids):
            return False
        probe = opening if isinstance(opening, Probe) else None
        sequence = DraftSequence(
            key=key,
            token_ids=list(opening.token_ids),
            num_prompt_tokens=opening.num_prompt_tokens,
            sampling=opening.sampling,
            round=opening.round,
            mirrors_noise=terms.mirrors_noise,
            vocab_size=terms.vocab_size,
            max_nodes=terms.max_nodes,
            shape=None if probe is None else probe.shape,
            is_probe=probe is not None,
            tree_request=opening.tree_request,
            cache_salt=opening.cache_salt,
            max_conditional=terms.max_conditional,
            # A greedy target takes the likeliest token, so the draft proposes that and draws none.
            draws_chains=terms.draws_chains and not opening.sampling.is_greedy,
        )
        self._sequences[key] = sequence
        self.recorder.opened(key, opening)
        if not sequence.tree_request.is_paused:
            self.due[key] = sequence
        self._drafter.open(sequence)
        if probe is not None and probe.features is not None:
            self._drafter.add_features(sequence, probe.features)
        return True

    def _are_valid(self, token_ids: Sequence[int]) -> bool:
        """Whether there are tokens, and the drafter has an embedding for each of them."""
        if not token_ids or min(token_ids) < 0:
            return False
        return self._vocab_size is None or max(token_ids) < self._vocab_size

    def _decide(self, key: SequenceKey, result: RoundResult) -> None:
        sequence, verdict = self._sequences.get(key), result.verdict
        if sequence is None:
            return
        committed = verdict.committed_token_ids
        is_in_sync = sequence.num_tokens + len(committed) == verdict.committed_token_count
        if not is_in_sync or not self._are_valid(committed):
            log.warning(
                "sequence %d released: round %d commits %d tokens to %d, the target counts %d",
                *(key.sequence_id, verdict.round, len(committed)),
                *(sequence.num_tokens, verdict.committed_token_count),
            )
            self.release(sequence)
            return
        self.recorder.decided(key, verdict)
        sequence.token_ids.extend(committed)
        sequence.round = verdict.round + 1
        sequence.tree_request = verdict.tree_request
        self._sequences.move_to_end(key)
        # The tree that was pushed for the verdict, if one was, is the next one to be verified.
        in_flight, sequence.in_flight = sequence.in_flight, None
        self.unprepared.pop(key, None)
        if in_flight is not None and not verdict.tree_request.is_paused:
            sequence.in_flight = in_flight.successor(verdict)
        if sequence.in_flight is not None:
            self.recorder.counters.num_lookahead_hits += 1
            self.unprepared[key] = sequence
        self.due[key] = sequence
        is_ahead = sequence.in_flight is not None or verdict.outcome is Outcome.VERIFIED_NEXT_READY
        if is_ahead or verdict.tree_request.is_paused:
            # The target verifies a tree that was pushed ahead, or requests none. A later verdict
            # makes the sequence due again.
            del self.due[key]
        self._drafter.commit(sequence, verdict, result.features)
