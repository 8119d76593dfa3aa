"""Which sequences have a lane whose trees remote drafts push, and when there are such lanes."""

from __future__ import annotations

from services.target.clock import Clock
from services.target.drafts.attachments import Attachments
from services.target.drafts.feature_store import FeatureSpec
from services.target.rounds.round_requests import can_be_round
from services.target.scheduler import Scheduler
from services.target.sequence import Sequence


class SelectionTerms:
    """Looks at who runs and at their drafts. Owned by the engine thread."""

    def __init__(self, scheduler: Scheduler, attachments: Attachments, clock: Clock) -> None:
        self._scheduler = scheduler
        self._attachments = attachments
        self._clock = clock

    @property
    def are_met(self) -> bool:
        """Whether lanes draw in this turn: a tree is wanted of a draft, and drafts read nothing
        that the device has yet to write."""
        return (
            self._attachments.assignments.num_drafted_for > 0
            and self.are_features_known
            and self._verifies_whole_trees
            and not self._any_moves()
        )

    @property
    def are_features_known(self) -> bool:
        """Whether lanes can keep what drafts read: features of one kind at most, which leave the
        device before a draft reads them."""
        drafts = self._attachments.drafts.live
        return len(self.wanted_features) <= 1 and all(each.is_elsewhere for each in drafts)

    @property
    def wanted_features(self) -> dict[str, FeatureSpec]:
        """What drafts read, by key."""
        specs = (each.feature_spec for each in self._attachments.drafts.live)
        return {spec.key: spec for spec in specs if spec is not None}

    def suit(self, sequence: Sequence) -> bool:
        """Whether a lane can do all that the request asks for."""
        assignment = self._attachments.assignments.get(sequence.sequence_id)
        wanted = sequence.request.draft_algorithm or ""
        algorithm = wanted if assignment is None else assignment.attachment.identity.algorithm
        if sequence.needs_host_before_next_step:
            return False
        return can_be_round(sequence.request, algorithm)

    @property
    def _verifies_whole_trees(self) -> bool:
        """Whether a controller that chooses leaves all trees as they are, and drafts for all."""
        controller, assignments = self._attachments.controller, self._attachments.assignments
        if not controller.is_adaptive:
            return True
        are_fixed = all(each.course.fixed_wish is not None for each in assignments)
        return not assignments.num_paused and (are_fixed or controller.verifies_whole_trees)

    def _any_moves(self) -> bool:
        """Whether a sequence is to leave a silent draft, or to come to one that has become ready
        for it, which they do between steps of the general path."""
        assignments = self._attachments.assignments
        hands_out = self._attachments.controller.is_adaptive
        if hands_out and assignments.any_joins(self._scheduler.running):
            return True
        return self._attachments.drafts.are_some_silent and assignments.any_leaves(self._clock())
