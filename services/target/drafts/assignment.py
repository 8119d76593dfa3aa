"""A sequence's place at a draft, and what the draft has pushed for it. No torch.

A *pushed* candidate is for the round after the current one, should the current round end in the
verdict it names. The match is selected when the verdict falls, or when it arrives after that very
verdict, so that a block on its way is not drafted again.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field, replace

from services.target.control.course import Course
from services.target.control.kept import Kept, narrowed
from services.target.drafts.attachment import Attachment
from services.target.drafts.outcome_tally import Foreseen
from services.target.sequence import Sequence
from shared.draft_wishes import OUTCOMES
from shared.tokens import EMPTY_TREE, Candidate, Condition, Outcome, TokenTree, TreeWish, Verdict

MAX_CONDITIONAL_CANDIDATES = OUTCOMES.highest
"""Conditional candidates kept for one sequence and round; more are dropped."""


@dataclass(frozen=True, slots=True)
class _Decided:
    """The last verdict with the fence of its round."""

    verdict: Verdict
    num_before: int

    def is_awaited_by(self, candidate: Candidate) -> bool:
        return (
            candidate.round == self.verdict.round
            and candidate.committed_token_count == self.num_before
            and candidate.condition == self.verdict.condition
        )


@dataclass(slots=True)
class Assignment:
    """One sequence at one draft. Owned by the engine thread.

    Attributes:
        deadline_s: until when the sequence waits for its candidate.
        asked_s: when the last verdict went out; None before the first.
        heard_s: when the candidate for the current round came; None while there is none.
        candidate: for the current round.
        prefers_local: the current round does not wait, because the target has a better tree, or the
            draft has said that its own will be late.
        allowed: the part of its tree that the request allows; None is all of it.
        kept: the part of that which is worth verifying, as part of the whole; None likewise.
        course: what is known and wanted of the sequence at this draft.
        is_stepping: a step is computing the current round, so its tree is chosen.
        stale_in_round: something for another state arrived since the last verdict.
        num_heard: unconditional candidates that were current.
        num_features_sent: position after the last feature row that was sent; None before any.
    """

    attachment: Attachment
    sequence: Sequence
    course: Course
    deadline_s: float
    asked_s: float | None = None
    heard_s: float | None = None
    candidate: Candidate | None = None
    prefers_local: bool = False
    allowed: Kept | None = None
    kept: Kept | None = None
    is_stepping: bool = False
    stale_in_round: bool = False
    num_heard: int = 0
    num_features_sent: int | None = None
    _pushed: dict[Condition, Candidate] = field(default_factory=dict)
    _sealed: frozenset[Condition] = frozenset()
    _decided: _Decided | None = None

    @property
    def tree(self) -> TokenTree:
        """The tree for the current round, perhaps empty."""
        return self._part(self.kept)

    @property
    def allowed_tree(self) -> TokenTree:
        """As much of the current round's tree as the request allows, perhaps empty."""
        return self._part(self.allowed)

    @property
    def is_announced(self) -> bool:
        """Whether the draft pushes trees for verdicts on the current round's tree."""
        return self.candidate is not None and self.candidate.candidate_id is not None

    def as_drafted(self, nodes: SequenceOf[int]) -> tuple[int, ...]:
        """Returns nodes of `tree` as indices into the tree that the draft sent."""
        return tuple(nodes if self.kept is None else (self.kept.nodes[node] for node in nodes))

    def cut(self, kept: Kept | None) -> None:
        """Has only part of `allowed_tree` verified; None is all of it."""
        self.kept = self.allowed if kept is None else kept.within(self.allowed)

    def receive(self, candidate: Candidate, now_s: float) -> None:
        """A candidate for the current round arrived."""
        self._take(candidate)
        self.heard_s = now_s

    def go_without(self, now_s: float) -> None:
        """The current round waits no longer for a tree."""
        self.prefers_local, self.deadline_s = True, now_s

    def was_warming(self, now_s: float) -> bool:
        """Whether the draft has prepared something since the last verdict went out."""
        return self.asked_s is not None and self.attachment.warming.was_on(self.asked_s, now_s)

    def response_s(self, now_s: float) -> float | None:
        """Returns how long the draft took for what arrives now; None where that says nothing of the
        next, because nobody had asked or it was preparing something."""
        if self.asked_s is None or self.was_warming(now_s):
            return None
        return now_s - self.asked_s

    @property
    def waited_s(self) -> float:
        """How long the current round waited for its candidate, in vain or not."""
        if self.asked_s is None:
            return 0.0
        return max((self.deadline_s if self.heard_s is None else self.heard_s) - self.asked_s, 0.0)

    @property
    def is_missed(self) -> bool:
        """Whether the current round goes without a candidate that was waited for."""
        was_asked = self.asked_s is not None and not self.course.asked.is_paused
        return self.candidate is None and was_asked and not self.prefers_local

    def awaits(self, candidate: Candidate) -> bool:
        """Whether an unconditional candidate can still be verified in its round."""
        return self.fences(candidate) and not self.is_stepping

    def fences(self, candidate: Candidate) -> bool:
        """Whether a candidate is for the current state of the sequence."""
        return candidate.round == self.sequence.round and candidate.committed_token_count == len(
            self.sequence.token_ids
        )

    def push(self, candidate: Candidate) -> None:
        """Keeps a current conditional candidate; a later one for the same verdict replaces it."""
        assert candidate.condition is not None
        if candidate.condition in self._sealed:
            return
        is_new = candidate.condition not in self._pushed
        if not is_new or len(self._pushed) < MAX_CONDITIONAL_CANDIDATES:
            self._pushed[candidate.condition] = candidate

    def seal(self) -> tuple[Candidate, ...]:
        """Returns what was pushed for verdicts on the current round's tree. The device has it from
        now on, so nothing replaces it; what comes for other verdicts is kept as ever."""
        assert self.candidate is not None
        named = self.candidate.candidate_id
        assert named is not None, "nothing is pushed for a tree without a name"
        pushed = self._pushed.items()
        sealed = [each for condition, each in pushed if condition.candidate_id == named]
        self._sealed = frozenset(each.condition for each in sealed if each.condition is not None)
        return tuple(sealed)

    def is_awaited(self, candidate: Candidate) -> bool:
        """Whether a conditional candidate was prepared for the verdict that fell last."""
        return self._decided is not None and self._decided.is_awaited_by(candidate)

    def decide(
        self,
        committed_token_ids: tuple[int, ...],
        accepted_node_indices: tuple[int, ...],
        wish: TreeWish,
        *,
        was_verified: bool,
    ) -> tuple[Verdict, Foreseen | None]:
        """Moves on to the next round, which `sequence.round` is already.

        Args:
            accepted_node_indices: into the tree as it was drafted.
            was_verified: the tree of this assignment's candidate was.

        Returns:
            The verdict, and which pushed candidate was selected for the next round, if one was.
        """
        verdict = Verdict(
            self.sequence.sequence_id,
            self.sequence.round - 1,
            Outcome.VERIFIED if was_verified else Outcome.MISSED,
            accepted_node_indices if was_verified else (),
            committed_token_ids,
            len(self.sequence.token_ids),
            wish,
            candidate_id=self.candidate.candidate_id if was_verified and self.candidate else None,
        )
        selected = self._pushed.get(verdict.condition)
        foreseen = None
        if selected is not None:
            foreseen = Foreseen(len(accepted_node_indices), self._rank(verdict.condition))
        verdict = self._with_outcome(verdict, selected)
        num_before = len(self.sequence.token_ids) - len(committed_token_ids)
        self._decided = _Decided(verdict, num_before)
        self._pushed.clear()
        self._sealed = frozenset()
        self.candidate = self.allowed = self.kept = None
        if selected is not None:
            self._take(selected)
        self.is_stepping = False
        self.stale_in_round = False
        return verdict, foreseen

    def is_left_alone(self, now_s: float) -> bool:
        """Whether its draft does not answer, and nothing is awaited of it."""
        is_waiting = self.candidate is not None or now_s < self.deadline_s
        return not is_waiting and self.attachment.is_silent(now_s)

    @property
    def is_late(self) -> bool:
        """Whether the draft is at work on the current round's tree."""
        return self.candidate is None and not self.course.asked.is_paused

    @property
    def needs_every_step(self) -> bool:
        """Whether the next step depends on this one's verdict or on the draft's answer to it."""
        return not self.is_idle or self.candidate is not None

    @property
    def is_idle(self) -> bool:
        """Whether no tree is wanted, neither for this round nor for the next."""
        return self.course.asked.is_paused and self.course.wish.is_paused

    @property
    def has_pushed(self) -> bool:
        """Whether the draft prepared for any verdict of the current round."""
        return bool(self._pushed)

    def _take(self, candidate: Candidate) -> None:
        """Has a candidate for the current round."""
        self.candidate = candidate
        self.allowed = narrowed(candidate.tree, self.sequence.request.num_draft_tokens)
        self.cut(None)
        self.course.grown = candidate.shape

    def _part(self, kept: Kept | None) -> TokenTree:
        if self.candidate is None:
            return EMPTY_TREE
        return self.candidate.tree if kept is None else kept.tree

    def _rank(self, condition: Condition) -> int:
        same_node = [each for each in self._pushed if each.node_index == condition.node_index]
        return same_node.index(condition)

    def _with_outcome(self, verdict: Verdict, selected: Candidate | None) -> Verdict:
        outcome, next_id = verdict.outcome, None
        if selected is not None and outcome is Outcome.VERIFIED:
            outcome, next_id = Outcome.VERIFIED_NEXT_READY, selected.candidate_id
        elif outcome is Outcome.MISSED and self.stale_in_round:
            outcome = Outcome.STALE
        if outcome is verdict.outcome:
            return verdict
        return replace(verdict, outcome=outcome, next_candidate_id=next_id)
