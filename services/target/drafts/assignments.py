"""Assignments of sequences to drafts, with the candidates that drafts pushed for them. No torch."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field, replace
from itertools import repeat

from services.target.drafts.attachment import Attachment, DraftRegistry
from services.target.scheduler import NO_CUT_TREE, narrowed
from services.target.sequence import Sequence
from services.target.step_report import Foreseen
from shared.candidate_columns import CandidateColumns, ConditionKey, Run
from shared.sampling_defaults import OUTCOMES
from shared.tokens import (
    ANY_TREE,
    EMPTY_TREE,
    Candidate,
    OpenedSequence,
    Outcome,
    ShapeOrPlain,
    TokenTree,
    TreeRequest,
    TreeShape,
    Verdict,
)

# A *pushed* candidate is for the round after the current one, should the current round end in the
# verdict that the candidate names. The matching candidate is selected at the verdict. One that
# arrives after its verdict is taken as well, so that the draft need not draft the same tree again.

MAX_CONDITIONAL_CANDIDATES = OUTCOMES.highest
"""Conditional candidates kept for one sequence and round; more are dropped."""


@dataclass(frozen=True, slots=True)
class _LastVerdict:
    """The last verdict, and the state of the sequence before it: round and committed tokens."""

    round: int
    num_before: int
    condition: ConditionKey

    def fences(self, run: Run) -> bool:
        return run.round == self.round and run.committed_token_count == self.num_before


@dataclass(slots=True)
class Assignment:
    """One sequence at one draft. Owned by the engine thread.

    Attributes:
        deadline_s: time until which the sequence waits for its candidate.
        requested: the tree request of the current round.
        verdict_s: time of the last verdict; None before the first.
        received_s: arrival time of the candidate for the current round; None before.
        candidate: the candidate for the current round.
        is_excused: the current round does not wait for a tree, because the draft reads a prompt or
            has said that its tree will be late.
        tree: the part of the candidate's tree that the request allows, perhaps empty.
        drafted_nodes: for each node of `tree`, its index in the tree that the draft sent.
        is_stepping: a step is computing the current round, so its tree is fixed.
        stale_in_round: a candidate for another state has arrived since the last verdict.
        late_candidate: a candidate for the current round that arrived while a step computed it.
        late_subtree: the part of the previous round's late candidate that fits the current round.
        num_received: unconditional candidates received, for any round.
        num_requested: trees requested since the assignment, or since a pause.
        num_features_sent: position after the last feature row that was sent; None before any.
    """

    attachment: Attachment
    sequence: Sequence
    deadline_s: float
    requested: TreeRequest = ANY_TREE
    verdict_s: float | None = None
    received_s: float | None = None
    candidate: Candidate | None = None
    is_excused: bool = True
    tree: TokenTree = EMPTY_TREE
    drafted_nodes: tuple[int, ...] = ()
    is_stepping: bool = False
    stale_in_round: bool = False
    late_candidate: Candidate | None = None
    late_subtree: TokenTree = EMPTY_TREE
    num_received: int = 0
    num_requested: int = 1
    num_features_sent: int | None = None
    _pushed: dict[ConditionKey, tuple[CandidateColumns, int]] = field(default_factory=dict)
    _sealed: dict[ConditionKey, Candidate] = field(default_factory=dict)
    _last_verdict: _LastVerdict | None = None

    @property
    def has_fixed_depth(self) -> bool:
        """Whether the request sets the depth of its trees, and so wants trees in every round."""
        return self.sequence.request.num_draft_steps is not None

    @property
    def tree_request(self) -> TreeRequest:
        """The tree request for the next round."""
        request, base = self.sequence.request, self.attachment.base_shape
        steps = request.num_draft_steps
        if steps is not None and not self.attachment.policy.is_pinned:
            num_nodes = steps if base.topk == 1 else max(steps, base.max_node_count)
            tree_request = TreeRequest(TreeShape(steps, base.topk, num_nodes + 1))
        else:
            tree_request = self.attachment.policy.tree_request
        if request.num_outcomes is None or tree_request.is_paused:
            return tree_request
        return replace(tree_request, num_outcomes=request.num_outcomes)

    @property
    def choice(self) -> ShapeOrPlain:
        """The requested shape of the current round's tree; None for a plain step."""
        if self.requested.is_paused:
            return None
        return self.requested.shape or self.attachment.base_shape

    @property
    def shape(self) -> TreeShape:
        """Shape of the current round's tree; the requested shape until the tree arrives."""
        received = None if self.candidate is None else self.candidate.shape
        return received or self.requested.shape or self.attachment.base_shape

    @property
    def pushes_ahead(self) -> bool:
        """Whether the draft pushes trees for possible verdicts on the current round's tree."""
        return self.candidate is not None and self.candidate.candidate_id is not None

    def receive(self, candidate: Candidate, now_s: float) -> None:
        """Takes a candidate that arrived for the current round."""
        self._take(candidate)
        self.received_s = now_s

    def stop_waiting(self, now_s: float) -> None:
        """Ends the current round's wait for a tree."""
        self.is_excused, self.deadline_s = True, now_s

    def was_warming(self, now_s: float) -> bool:
        """Whether the draft has been in a warm-up since the last verdict."""
        return self.verdict_s is not None and self.attachment.warm_up.was_on(self.verdict_s, now_s)

    def response_s(self, now_s: float) -> float | None:
        """Returns the response time of a candidate that arrives now; None where it says nothing
        about later ones: there was no verdict to respond to, or the draft was in a warm-up."""
        if self.verdict_s is None or self.was_warming(now_s):
            return None
        return now_s - self.verdict_s

    @property
    def num_features(self) -> int:
        """Positions whose features can be sent. The last token is left out: its row is computed
        before the verdict on it, and the draft does not know the token yet."""
        return min(self.sequence.num_computed, len(self.sequence.token_ids) - 1)

    @property
    def lacks_features(self) -> bool:
        """Whether the draft reads features and has not been sent all that exist."""
        is_reader = self.attachment.reads_features
        return is_reader and self.num_features > (self.num_features_sent or 0)

    @property
    def has_waited(self) -> bool:
        """Whether the current round has waited for a tree: its draft was neither reading, nor in a
        warm-up, nor silent."""
        return self.verdict_s is not None and self.deadline_s > self.verdict_s

    def fences(self, run: Run) -> bool:
        """Whether candidates are for the current state of the sequence."""
        is_same_round = run.round == self.sequence.round
        return is_same_round and run.committed_token_count == len(self.sequence.token_ids)

    def push(self, columns: CandidateColumns, places: range) -> None:
        """Keeps current conditional candidates; a later one for the same verdict replaces an
        earlier one."""
        pushed = zip(columns.keys(places), zip(repeat(columns), places, strict=False), strict=True)
        if not self._sealed and len(self._pushed) + len(places) <= MAX_CONDITIONAL_CANDIDATES:
            self._pushed.update(pushed)
            return
        for key, place in pushed:
            has_room = key in self._pushed or len(self._pushed) < MAX_CONDITIONAL_CANDIDATES
            if key not in self._sealed and has_room:
                self._pushed[key] = place

    def seal(self) -> tuple[Candidate, ...]:
        """Returns the candidates pushed for verdicts on the current round's tree.

        The device has these from now on, so later candidates for the same verdicts do not replace
        them. Candidates for other verdicts are still accepted.
        """
        assert self.candidate is not None
        candidate_id = self.candidate.candidate_id
        assert candidate_id is not None, "no candidates are pushed for a tree without an id"
        self._sealed = {
            key: self._sealed.get(key) or columns.candidate(place)
            for key, (columns, place) in self._pushed.items()
            if key[2] == candidate_id
        }
        return tuple(self._sealed.values())

    def match_last_verdict(self, columns: CandidateColumns, run: Run) -> int | None:
        """Returns the place of the conditional candidate for the last verdict, if there is one."""
        last = self._last_verdict
        if last is None or not last.fences(run):
            return None
        pairs = zip(run.places, columns.keys(run.places), strict=True)
        return next((place for place, key in pairs if key == last.condition), None)

    def decide(
        self,
        committed_token_ids: tuple[int, ...],
        accepted_node_indices: tuple[int, ...],
        *,
        was_verified: bool,
    ) -> tuple[Verdict, Foreseen | None]:
        """Moves on to the next round and requests its tree. `sequence.round` is that round already.

        Args:
            accepted_node_indices: indices into the tree as it was drafted.
            was_verified: whether the tree of this assignment's candidate was verified.

        Returns:
            The verdict, and the pushed candidate selected for the next round, if there was one.
        """
        round_, num_tokens = self.sequence.round - 1, len(self.sequence.token_ids)
        accepted = accepted_node_indices if was_verified else ()
        verified = self.candidate if was_verified else None
        verified_id = None if verified is None else verified.candidate_id
        key = accepted[-1] if accepted else -1, committed_token_ids[-1], verified_id or 0
        selected = self._sealed.get(key)
        if selected is None and key in self._pushed:
            columns, place = self._pushed[key]
            selected = columns.candidate(place)
        next_id = None if selected is None or not was_verified else selected.candidate_id
        if was_verified:
            outcome = Outcome.VERIFIED if selected is None else Outcome.VERIFIED_NEXT_READY
        else:
            outcome = Outcome.STALE if self.stale_in_round else Outcome.MISSED
        self.requested = tree_request = self.tree_request
        self.num_requested = 0 if tree_request.is_paused else self.num_requested + 1
        verdict = Verdict(
            self.sequence.sequence_id,
            round_,
            outcome,
            accepted,
            committed_token_ids,
            num_tokens,
            tree_request,
            verified_id,
            next_id,
        )
        foreseen = None
        if selected is not None:
            of_position = [pushed for pushed in self._pushed if pushed[0] == key[0]]
            foreseen = Foreseen(len(accepted), of_position.index(key))
        self._last_verdict = _LastVerdict(round_, num_tokens - len(committed_token_ids), key)
        self._pushed.clear()
        self._sealed.clear()
        self.candidate, (self.tree, self.drafted_nodes) = None, NO_CUT_TREE
        if selected is not None:
            self._take(selected)
        late, self.late_candidate, self.late_subtree = self.late_candidate, None, EMPTY_TREE
        if late is not None:
            subtree = late.tree.below(committed_token_ids)
            self.late_subtree, _ = narrowed(subtree, self.sequence.request.num_draft_tokens)
        self.is_stepping = False
        self.stale_in_round = False
        return verdict, foreseen

    def has_silent_draft(self, now_s: float) -> bool:
        """Whether the draft is silent, and the sequence neither has nor awaits a tree of it."""
        is_served = self.candidate is not None or now_s < self.deadline_s
        return not is_served and self.attachment.timeout.awaits_probe(now_s)

    @property
    def is_idle(self) -> bool:
        """Whether no tree is wanted, neither for this round nor for the next."""
        return self.requested.is_paused and self.tree_request.is_paused

    @property
    def has_pushed(self) -> bool:
        """Whether the draft has pushed a tree for any verdict on the current round."""
        return bool(self._pushed)

    def _take(self, candidate: Candidate) -> None:
        self.candidate = candidate
        num_draft_tokens = self.sequence.request.num_draft_tokens
        self.tree, self.drafted_nodes = narrowed(candidate.tree, num_draft_tokens)


MIN_KIND_GAIN = 1.1
"""A kind of draft must be this many times faster for a sequence to move to it."""


class Assignments:
    """All sequences that have a draft; a sequence has at most one. Owned by the engine thread."""

    def __init__(self, drafts: DraftRegistry) -> None:
        self._drafts = drafts
        self._by_sequence_id: dict[int, Assignment] = {}
        self._num_move_checks = 0

    def __len__(self) -> int:
        return len(self._by_sequence_id)

    def __iter__(self) -> Iterator[Assignment]:
        return iter(self._by_sequence_id.values())

    @property
    def num_paused(self) -> int:
        """Sequences that have a draft, but request no trees at the moment."""
        return sum(assignment.requested.is_paused for assignment in self)

    @property
    def num_drafted_for(self) -> int:
        """Sequences that request trees at the moment."""
        return len(self._by_sequence_id) - self.num_paused

    @property
    def needs_every_step(self) -> bool:
        """Whether the next step of any sequence depends on the verdict of the current one, or on
        the draft's response to it."""
        return any(own.candidate is not None or not own.is_idle for own in self)

    def get(self, sequence_id: int) -> Assignment | None:
        """Returns the assignment of a sequence; None when it has no draft."""
        return self._by_sequence_id.get(sequence_id)

    def tree(self, sequence: Sequence) -> TokenTree:
        """Returns the tree to verify in the sequence's current round, perhaps empty: its candidate,
        or else the subtree of the candidate that was late for the previous round."""
        assignment = self.get(sequence.sequence_id)
        if assignment is None:
            return EMPTY_TREE
        return assignment.tree if assignment.candidate is not None else assignment.late_subtree

    def has_tree(self, sequence: Sequence) -> bool:
        """Whether the sequence has a candidate tree for the current round."""
        assignment = self.get(sequence.sequence_id)
        return assignment is not None and bool(assignment.tree.token_ids)

    def assign(self, sequence: Sequence, now_s: float) -> None:
        """Assigns a sequence to a draft with room, if it has none and trees are wanted: to the
        fastest kind of draft, and there to the draft with the least load."""
        drafts = self._eligible(sequence)
        if drafts:
            preferred = [draft for draft in drafts if not draft.is_avoided(now_s)]
            self._place(sequence, _best(preferred or drafts), now_s)

    def any_moves(self, running: SequenceOf[Sequence], now_s: float) -> bool:
        """Whether `reassign` would assign or take back any of these sequences, or
        `leave_silent_drafts` move one."""
        if any(map(_is_unwanted, self)):
            return True
        if len(self) < len(running) and any(map(self._eligible, running)):
            return True
        return any(map(self._responsive, self._at_silent_drafts(now_s)))

    def leave_silent_drafts(self, now_s: float) -> None:
        """Moves sequences from silent drafts to drafts that respond and have room."""
        for assignment in self._at_silent_drafts(now_s):
            sequence, drafts = assignment.sequence, self._responsive(assignment)
            if drafts:
                self._close(assignment)
                self._place(sequence, _best(drafts), now_s)

    def _at_silent_drafts(self, now_s: float) -> list[Assignment]:
        drafts = self._drafts.live
        if len(drafts) <= 1 or not any(draft.timeout.is_cold for draft in drafts):
            return []
        return [assignment for assignment in self if assignment.has_silent_draft(now_s)]

    def _responsive(self, assignment: Assignment) -> list[Attachment]:
        """Returns the drafts that would take a sequence and are not silent."""
        drafts = self._takers(assignment.sequence)
        return [draft for draft in drafts if not draft.timeout.is_cold]

    def _eligible(self, sequence: Sequence) -> list[Attachment]:
        """Returns the drafts to which a sequence without one may be assigned."""
        if sequence.request.speculation_disabled or sequence.prediction is not None:
            return []
        if sequence.sequence_id in self._by_sequence_id:
            return []
        return self._takers(sequence)

    def _takers(self, sequence: Sequence) -> list[Attachment]:
        return [draft for draft in self._drafts.live if _is_wanted(draft, sequence)]

    def reassign(self, running: SequenceOf[Sequence], now_s: float) -> None:
        """Takes sequences back from drafts whose trees are no longer wanted, and assigns sequences
        without a draft where trees are wanted."""
        for assignment in list(filter(_is_unwanted, self)):
            self._close(assignment)
        if len(self) < len(running):
            for sequence in running:
                self.assign(sequence, now_s)

    def hand_over(self, attachment: Attachment, now_s: float) -> None:
        """Assigns the sequences of a draft that has left to other drafts with room."""
        for sequence_id in tuple(attachment.sequence_ids):
            assignment = self._by_sequence_id[sequence_id]
            self._take_out(assignment)
            self.assign(assignment.sequence, now_s)

    def release(self, attachment_id: str, sequence_ids: Iterable[int], now_s: float) -> None:
        """Takes back sequences that a draft releases, and assigns them to others with room."""
        attachment = self._drafts.get(attachment_id)
        for sequence_id in sequence_ids:
            assignment = self.get(sequence_id)
            if attachment is None or assignment is None or assignment.attachment is not attachment:
                continue
            self._take_out(assignment)
            attachment.released.add(sequence_id)
            self.assign(assignment.sequence, now_s)

    def close(self, sequence: Sequence) -> None:
        """Takes a sequence from its draft, if it has one, and forgets which drafts released it."""
        for attachment in self._drafts.live:
            attachment.released.discard(sequence.sequence_id)
        assignment = self.get(sequence.sequence_id)
        if assignment is not None:
            self._close(assignment)

    def move_one(self, waiting: SequenceOf[Assignment], now_s: float) -> None:
        """Moves a sequence to a draft of another kind, if that kind is faster or its speed is
        unknown. Checks one sequence a step, in turn.

        Args:
            waiting: assignments without a candidate.
        """
        if not waiting or len(self._drafts.policies) <= 1:
            return
        self._num_move_checks += 1
        assignment = waiting[self._num_move_checks % len(waiting)]
        sequence, own = assignment.sequence, assignment.attachment
        faster = [
            draft
            for draft in self._drafts.live
            if draft.kind != own.kind
            and _is_wanted(draft, sequence)
            and _speed(draft) > MIN_KIND_GAIN * _speed(own)
        ]
        is_measured = own.policy.speed is not None
        if faster and is_measured and not assignment.has_fixed_depth:
            self._close(assignment)
            self._place(sequence, _best(faster), now_s)

    def _place(self, sequence: Sequence, attachment: Attachment, now_s: float) -> None:
        """Opens a sequence at a draft."""
        # The deadline is now: the draft may have a long prompt to read before its first tree.
        assignment = Assignment(attachment, sequence, now_s)
        assignment.requested = assignment.tree_request
        self._by_sequence_id[sequence.sequence_id] = assignment
        attachment.sequence_ids.add(sequence.sequence_id)
        attachment.outbox.opened.append(
            OpenedSequence(
                sequence.sequence_id,
                tuple(sequence.token_ids),
                sequence.num_prompt_tokens,
                sequence.sampling,
                sequence.round,
                assignment.requested,
                request_id=sequence.request.request_id,
                traceparent=sequence.request.traceparent,
                cache_salt=sequence.request.cache_salt,
            )
        )

    def _close(self, assignment: Assignment) -> None:
        """Takes a sequence from its draft and tells the draft."""
        self._take_out(assignment)
        assignment.attachment.close(assignment.sequence.sequence_id)

    def _take_out(self, assignment: Assignment) -> None:
        sequence = assignment.sequence
        sequence.left_draft_in = sequence.round
        del self._by_sequence_id[sequence.sequence_id]
        assignment.attachment.sequence_ids.remove(sequence.sequence_id)


def _is_wanted(attachment: Attachment, sequence: Sequence) -> bool:
    """Whether a draft may take a sequence and its trees are wanted."""
    if not attachment.takes(sequence):
        return False
    return sequence.request.num_draft_steps is not None or attachment.policy.current is not None


def _is_unwanted(assignment: Assignment) -> bool:
    """Whether the draft's trees are no longer wanted for the sequence."""
    return not (assignment.has_fixed_depth or assignment.attachment.policy.current is not None)


def _speed(attachment: Attachment) -> float:
    """Returns the tokens a second of one sequence. While the speed is unknown, it counts as
    infinite for the first sequence, which measures it, and as zero for others."""
    speed = attachment.policy.speed
    if speed is None:
        return 0.0 if attachment.sequence_ids else math.inf
    return speed


def _best(drafts: Iterable[Attachment]) -> Attachment:
    """Returns the draft of the fastest kind, and of these the one with the least load."""
    return min(drafts, key=lambda draft: (-_speed(draft), draft.load))
