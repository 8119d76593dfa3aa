"""Sequences at drafts: what a draft has pushed for each, and who assigns, moves and takes them
back. No torch."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field, replace
from itertools import repeat

from services.target.drafts.attachment import Attachment, DraftRegistry, OpenedSequence
from services.target.sequence import Sequence
from services.target.step_plan import NO_CUT_TREE, CutTree, narrowed
from services.target.step_report import Foreseen
from shared.candidate_columns import CandidateColumns, ConditionKey, Run
from shared.sampling_defaults import OUTCOMES
from shared.tokens import (
    ANY_TREE,
    EMPTY_TREE,
    Candidate,
    Choice,
    Outcome,
    TokenTree,
    TreeRequest,
    TreeShape,
    Verdict,
)

# A sequence's place at a draft, and what the draft has pushed for it. No torch.
#
# A *pushed* candidate is for the round after the current one, should the current round end in the
# verdict it names. The match is selected when the verdict falls, or when it arrives after that very
# verdict, so that a block on its way is not drafted again.


MAX_CONDITIONAL_CANDIDATES = OUTCOMES.highest
"""Conditional candidates kept for one sequence and round; more are dropped."""


@dataclass(frozen=True, slots=True)
class _Decided:
    """The last verdict with the fence of its round."""

    round: int
    num_before: int
    condition: ConditionKey

    def fences(self, run: Run) -> bool:
        return run.round == self.round and run.committed_token_count == self.num_before


@dataclass(slots=True)
class Assignment:
    """One sequence at one draft. Owned by the engine thread.

    Attributes:
        deadline_s: until when the sequence waits for its candidate.
        asked_s: when the last verdict went out; None before the first.
        heard_s: when the candidate for the current round came; None while there is none.
        candidate: for the current round.
        asked: the tree request of the current round.
        is_excused: the current round does not wait, because the draft reads a prompt, or has said
            that its tree will be late.
        allowed: the part of its tree that the request allows.
        is_stepping: a step is computing the current round, so its tree is chosen.
        stale_in_round: something for another state arrived since the last verdict.
        late: came for the current round while a step was computing it.
        rest: the subtree, for the current round, of the tree that was late for the previous one.
        is_moved: the sequence had output when it came to the draft, which then has to catch up.
        num_heard: unconditional candidates that came, for whichever round.
        num_asked: trees asked for since it came to the draft, or since a pause.
        num_features_sent: position after the last feature row that was sent; None before any.
    """

    attachment: Attachment
    sequence: Sequence
    deadline_s: float
    asked: TreeRequest = ANY_TREE
    asked_s: float | None = None
    heard_s: float | None = None
    candidate: Candidate | None = None
    is_excused: bool = True
    allowed: CutTree = NO_CUT_TREE
    is_stepping: bool = False
    stale_in_round: bool = False
    late: Candidate | None = None
    rest: TokenTree = EMPTY_TREE
    is_moved: bool = field(init=False)
    num_heard: int = 0
    num_asked: int = 1
    num_features_sent: int | None = None
    _pushed: dict[ConditionKey, tuple[CandidateColumns, int]] = field(default_factory=dict)
    _sealed: dict[ConditionKey, Candidate] = field(default_factory=dict)
    _decided: _Decided | None = None

    def __post_init__(self) -> None:
        self.is_moved = self.sequence.has_output

    @property
    def tree(self) -> TokenTree:
        """As much of the current round's tree as the request allows, perhaps empty."""
        return self.allowed[0]

    @property
    def is_bound(self) -> bool:
        """Whether trees are wanted whatever they bring, because the request set their depth."""
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
    def choice(self) -> Choice:
        """The requested shape of the current round's tree; None for a plain step."""
        return None if self.asked.is_paused else self.asked.shape or self.attachment.base_shape

    @property
    def shape(self) -> TreeShape:
        """Shape of the current round's tree; the requested one until the tree is here."""
        grown = None if self.candidate is None else self.candidate.shape
        return grown or self.asked.shape or self.attachment.base_shape

    @property
    def is_announced(self) -> bool:
        """Whether the draft pushes trees for verdicts on the current round's tree."""
        return self.candidate is not None and self.candidate.candidate_id is not None

    def as_drafted(self, nodes: SequenceOf[int]) -> tuple[int, ...]:
        """Returns nodes of `tree` as indices into the tree that the draft sent."""
        return tuple(self.allowed[1][node] for node in nodes)

    def receive(self, candidate: Candidate, now_s: float) -> None:
        """A candidate for the current round arrived."""
        self._take(candidate)
        self.heard_s = now_s

    def go_without(self, now_s: float) -> None:
        """The current round waits no longer for a tree."""
        self.is_excused, self.deadline_s = True, now_s

    def was_warming(self, now_s: float) -> bool:
        """Whether the draft has prepared something since the last verdict went out."""
        return self.asked_s is not None and self.attachment.warm_up.was_on(self.asked_s, now_s)

    def response_s(self, now_s: float) -> float | None:
        """Returns how long the draft took for what arrives now; None where that says nothing of the
        next, because nobody had asked or it was preparing something."""
        if self.asked_s is None or self.was_warming(now_s):
            return None
        return now_s - self.asked_s

    @property
    def num_features(self) -> int:
        """Positions whose features are there to send. Of the last token, whose row is computed
        while it is decided on, the draft does not know yet."""
        return min(self.sequence.num_computed, len(self.sequence.token_ids) - 1)

    @property
    def lacks_features(self) -> bool:
        """Whether its draft reads features and has not been sent all that are there."""
        is_reader = self.attachment.reads_features
        return is_reader and self.num_features > (self.num_features_sent or 0)

    @property
    def is_missed(self) -> bool:
        """Whether the current round goes without a candidate that was waited for."""
        return self.candidate is None and not (self.asked.is_paused or self.is_excused)

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
        """Returns the candidates pushed for verdicts on the current round's tree. The device has it
        from
        now on, so nothing replaces it; what comes for other verdicts is kept as ever."""
        assert self.candidate is not None
        named = self.candidate.candidate_id
        assert named is not None, "nothing is pushed for a tree without a name"
        self._sealed = {
            key: self._sealed.get(key) or columns.candidate(place)
            for key, (columns, place) in self._pushed.items()
            if key[2] == named
        }
        return tuple(self._sealed.values())

    def awaited(self, columns: CandidateColumns, run: Run) -> int | None:
        """Returns the place of the conditional candidate that was prepared for the verdict that
        fell last; None where there is none."""
        if self._decided is None or not self._decided.fences(run):
            return None
        pairs = zip(run.places, columns.keys(run.places), strict=True)
        return next((place for place, key in pairs if key == self._decided.condition), None)

    def decide(
        self,
        committed_token_ids: tuple[int, ...],
        accepted_node_indices: tuple[int, ...],
        *,
        was_verified: bool,
    ) -> tuple[Verdict, Foreseen | None]:
        """Moves on to the next round, which `sequence.round` is already, and asks for its tree.

        Args:
            accepted_node_indices: into the tree as it was drafted.
            was_verified: the tree of this assignment's candidate was.

        Returns:
            The verdict, and which pushed candidate was selected for the next round, if one was.
        """
        round_, num_tokens = self.sequence.round - 1, len(self.sequence.token_ids)
        accepted = accepted_node_indices if was_verified else ()
        verified = self.candidate if was_verified else None
        verified_id = None if verified is None else verified.candidate_id
        key = accepted[-1] if accepted else -1, committed_token_ids[-1], verified_id or 0
        selected = self._pushed_for(key)
        outcome, next_id = self._outcome(selected, was_verified=was_verified)
        self.asked = tree_request = self.tree_request
        self.num_asked = 0 if tree_request.is_paused else self.num_asked + 1
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
        foreseen = None if selected is None else Foreseen(len(accepted), self._rank(key))
        self._decided = _Decided(round_, num_tokens - len(committed_token_ids), key)
        self._pushed.clear()
        self._sealed.clear()
        self.candidate, self.allowed = None, NO_CUT_TREE
        if selected is not None:
            self._take(selected)
        late, self.late, self.rest = self.late, None, EMPTY_TREE
        if late is not None:
            rest = late.tree.below(committed_token_ids)
            self.rest, _ = narrowed(rest, self.sequence.request.num_draft_tokens)
        self.is_stepping = False
        self.stale_in_round = False
        return verdict, foreseen

    def is_left_alone(self, now_s: float) -> bool:
        """Whether its draft does not answer, and nothing is awaited of it."""
        is_waiting = self.candidate is not None or now_s < self.deadline_s
        return not is_waiting and self.attachment.is_silent(now_s)

    @property
    def needs_every_step(self) -> bool:
        """Whether the next step depends on this one's verdict or on the draft's answer to it."""
        return not self.is_idle or self.candidate is not None

    @property
    def is_idle(self) -> bool:
        """Whether no tree is wanted, neither for this round nor for the next."""
        return self.asked.is_paused and self.tree_request.is_paused

    @property
    def has_pushed(self) -> bool:
        """Whether the draft prepared for any verdict of the current round."""
        return bool(self._pushed)

    def _take(self, candidate: Candidate) -> None:
        """Has a candidate for the current round."""
        self.candidate = candidate
        self.allowed = narrowed(candidate.tree, self.sequence.request.num_draft_tokens)

    def _pushed_for(self, key: ConditionKey) -> Candidate | None:
        if key in self._sealed:
            return self._sealed[key]
        found = self._pushed.get(key)
        return None if found is None else found[0].candidate(found[1])

    def _rank(self, key: ConditionKey) -> int:
        return [each for each in self._pushed if each[0] == key[0]].index(key)

    def _outcome(
        self, selected: Candidate | None, *, was_verified: bool
    ) -> tuple[Outcome, int | None]:
        """Returns what happened to the candidate, and the one that is verified next already."""
        if not was_verified:
            return Outcome.STALE if self.stale_in_round else Outcome.MISSED, None
        if selected is None:
            return Outcome.VERIFIED, None
        return Outcome.VERIFIED_NEXT_READY, selected.candidate_id


MIN_KINDS = 2
MIN_KIND_GAIN = 1.1
"""A kind of draft must be this much faster for a sequence to move there."""


class Assignments:
    """Sequences that have a draft, each at one. Owned by the engine thread."""

    def __init__(self, drafts: DraftRegistry) -> None:
        self._drafts = drafts
        self._by_sequence_id: dict[int, Assignment] = {}
        self._num_looked = 0

    def __len__(self) -> int:
        return len(self._by_sequence_id)

    def __iter__(self) -> Iterator[Assignment]:
        return iter(self._by_sequence_id.values())

    @property
    def num_paused(self) -> int:
        """Sequences that have a draft, but go without trees at the moment."""
        return sum(each.asked.is_paused for each in self)

    @property
    def num_drafted_for(self) -> int:
        """Sequences for which trees are wanted at the moment."""
        return len(self._by_sequence_id) - self.num_paused

    @property
    def are_trees_wanted(self) -> bool:
        """Whether a tree is wanted for the next round of any sequence."""
        return any(not each.tree_request.is_paused for each in self)

    @property
    def needs_every_step(self) -> bool:
        """Whether what a step commits decides what the next one computes: a tree is wanted for a
        sequence."""
        return any(each.needs_every_step for each in self)

    def get(self, sequence_id: int) -> Assignment | None:
        """Returns the place of a sequence; None when it has no draft."""
        return self._by_sequence_id.get(sequence_id)

    def candidate_tree(self, sequence: Sequence) -> TokenTree:
        """The tree for the sequence's current round, perhaps empty."""
        assignment = self.get(sequence.sequence_id)
        return EMPTY_TREE if assignment is None else assignment.tree

    def tree(self, sequence: Sequence) -> TokenTree:
        """Returns what can be verified of drafts in the sequence's current round: the tree for it,
        or what is left of the one that came too late for the round before; perhaps empty."""
        assignment = self.get(sequence.sequence_id)
        if assignment is None:
            return EMPTY_TREE
        return assignment.tree if assignment.candidate is not None else assignment.rest

    def has_tree(self, sequence: Sequence) -> bool:
        """Whether the sequence's draft has a tree for the current round."""
        return bool(self.candidate_tree(sequence).token_ids)

    def assign(self, sequence: Sequence, now_s: float) -> None:
        """Hands a sequence to a draft with room, if it wants one and trees are wanted: of the kind
        that is fastest, and there to the one that answers soonest."""
        willing = self._willing(sequence)
        heard = [each for each in willing if not each.is_avoided(now_s)]
        if willing:
            self._place(sequence, _best(heard or willing), now_s)

    def any_moves(self, running: SequenceOf[Sequence], now_s: float) -> bool:
        """Whether `follow` would hand out or take back any of these, or `leave_silent` move one."""
        if any(_was_left(each) for each in self):
            return True
        if len(self) < len(running) and any(map(self._willing, running)):
            return True
        return any(self._refuges(each) for each in self._left_alone(now_s))

    def leave_silent(self, now_s: float) -> None:
        """Takes sequences from drafts that do not answer to others that do and have room."""
        for assignment in self._left_alone(now_s):
            sequence, others = assignment.sequence, self._refuges(assignment)
            if others:
                self._close(assignment)
                self._place(sequence, _best(others), now_s)

    def _left_alone(self, now_s: float) -> list[Assignment]:
        if not self._drafts.are_some_silent:
            return []
        return [each for each in self if each.is_left_alone(now_s)]

    def _refuges(self, assignment: Assignment) -> list[Attachment]:
        takers = self._takers(assignment.sequence)
        return [each for each in takers if not each.timeout.is_cold]

    def _willing(self, sequence: Sequence) -> list[Attachment]:
        """Returns the drafts that a sequence without one may go to."""
        if sequence.request.speculation_disabled or sequence.prediction is not None:
            return []
        if sequence.sequence_id in self._by_sequence_id:
            return []
        return self._takers(sequence)

    def _takers(self, sequence: Sequence) -> list[Attachment]:
        return [each for each in self._drafts.live if _is_wanted(each, sequence)]

    def follow(self, running: SequenceOf[Sequence], now_s: float) -> None:
        """Takes sequences back from drafts of which no trees are wanted any more, and hands out
        those that have no draft where trees are wanted."""
        for assignment in list(filter(_was_left, self)):
            self._close(assignment)
        if len(self) < len(running):
            for sequence in running:
                self.assign(sequence, now_s)

    def hand_over(self, attachment: Attachment, now_s: float) -> None:
        """A draft has left: others with room take its sequences."""
        for sequence_id in tuple(attachment.sequence_ids):
            sequence = self._by_sequence_id.pop(sequence_id).sequence
            self.assign(sequence, now_s)

    def release(self, attachment_id: str, sequence_ids: Iterable[int], now_s: float) -> None:
        """A draft hands sequences back; others with room take them."""
        attachment = self._drafts.get(attachment_id)
        for sequence_id in sequence_ids:
            assignment = self.get(sequence_id)
            if attachment is None or assignment is None or assignment.attachment is not attachment:
                continue
            self._take_out(assignment)
            attachment.released.add(sequence_id)
            self.assign(assignment.sequence, now_s)

    def close(self, sequence: Sequence) -> None:
        """Ends a sequence at its draft."""
        for attachment in self._drafts.live:
            attachment.released.discard(sequence.sequence_id)
        assignment = self.get(sequence.sequence_id)
        if assignment is not None:
            self._close(assignment)

    def move_one(self, held: SequenceOf[Assignment], now_s: float) -> None:
        """Takes a sequence to a draft of another kind that is faster, or not known yet. One is
        looked at a step, in turn."""
        if not held or len(self._drafts.policies) < MIN_KINDS:
            return
        self._num_looked += 1
        assignment = held[self._num_looked % len(held)]
        sequence, own = assignment.sequence, assignment.attachment
        if assignment.candidate is not None:
            return
        others = [
            each
            for each in self._drafts.live
            if each.kind != own.kind
            and _is_wanted(each, sequence)
            and _speed(each) > MIN_KIND_GAIN * _speed(own)
        ]
        is_known = own.policy.speed is not None
        if others and is_known and not assignment.is_bound:
            self._close(assignment)
            self._place(sequence, _best(others), now_s)

    def _place(self, sequence: Sequence, attachment: Attachment, now_s: float) -> None:
        """Opens a sequence at a draft."""
        # A first tree is never waited for: the draft may have a long prompt to read.
        assignment = Assignment(attachment, sequence, now_s)
        assignment.asked = assignment.tree_request
        self._by_sequence_id[sequence.sequence_id] = assignment
        attachment.sequence_ids.add(sequence.sequence_id)
        attachment.outbox_opened.append(
            OpenedSequence(
                sequence.sequence_id,
                tuple(sequence.token_ids),
                sequence.num_prompt_tokens,
                sequence.sampling,
                sequence.round,
                assignment.asked,
                request_id=sequence.request.request_id,
                traceparent=sequence.request.traceparent,
                cache_salt=sequence.request.cache_salt,
            )
        )

    def _close(self, assignment: Assignment) -> None:
        """Takes a sequence from its draft, and says so there."""
        self._take_out(assignment)
        assignment.attachment.close(assignment.sequence.sequence_id)

    def _take_out(self, assignment: Assignment) -> None:
        sequence_id = assignment.sequence.sequence_id
        del self._by_sequence_id[sequence_id]
        assignment.attachment.sequence_ids.remove(sequence_id)


def _is_wanted(attachment: Attachment, sequence: Sequence) -> bool:
    """Whether a draft may have a sequence, and trees of it are wanted."""
    if not attachment.takes(sequence):
        return False
    return sequence.request.num_draft_steps is not None or attachment.policy.is_on


def _was_left(assignment: Assignment) -> bool:
    """Whether no trees are wanted of the draft any more."""
    return not (assignment.is_bound or assignment.attachment.policy.is_on)


def _speed(attachment: Attachment) -> float:
    """Returns the tokens a second of a sequence. Of an unknown kind one sequence finds that out."""
    speed = attachment.policy.speed
    if speed is None:
        return 0.0 if attachment.sequence_ids else math.inf
    return speed


def _best(drafts: Iterable[Attachment]) -> Attachment:
    """Returns the draft of the fastest kind that would keep a sequence waiting least."""
    return min(drafts, key=lambda each: (-_speed(each), each.load))
