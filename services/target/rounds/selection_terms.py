"""Rules for lanes whose trees remote drafts push: when there are some, and for which sequences."""

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
        """Whether lanes draw in this turn: a tree is wanted of a draft, drafts read nothing that
        the device has yet to write, and no sequence is to come to a draft or to leave one, which
        they do between planned steps."""
        assignments = self._attachments.assignments
        return (
            assignments.are_trees_wanted
            and self.are_features_known
            and not assignments.any_moves(self._scheduler.running, self._clock())
        )

    @property
    def are_features_known(self) -> bool:
        """Whether lanes can keep what drafts read: features of one kind at most, which leave the
        device before a draft reads them."""
        drafts = self._attachments.drafts.live
        return len(self.wanted_features) <= 1 and all(each.is_elsewhere for each in drafts)

    @property
    def wanted_features(self) -> dict[str, FeatureSpec]:
        """The features that drafts read, by key."""
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
