"""The attached drafts, their assignments and their candidates. No torch.

A draft is an accelerator: everything here may be late, stale, duplicated or gone, and the target
steps all the same.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf

from services.target.control.speculation_controller import SpeculationController
from services.target.drafts.assignments import Assignments
from services.target.drafts.attachment import Attachment, AttachmentStatus
from services.target.drafts.candidate_intake import CandidateIntake
from services.target.drafts.draft_registry import DraftRegistry
from services.target.drafts.feature_needs import FeatureNeeds
from services.target.drafts.outcome_tally import RecentOutcomes
from services.target.drafts.readiness import Readiness
from services.target.drafts.verdicts import Verdicts
from services.target.fallback_order import FallbackOrder
from services.target.sequence import Sequence
from services.target.step_report import StepReport
from shared.tokens import TreeShape, TreeWish


class Attachments:
    """All that the engine does with drafts. Owned by the engine thread.

    Attributes:
        controller: decides on tree requests, and on the parts of trees to verify.
        drafts: who is attached.
        assignments: which sequence is at which draft, with which tree.
        intake: takes what drafts push.
        readiness: says which sequences step now.
        verdicts: sends drafts the committed tokens.
        feature_needs: which drafts lack rows of features.
        outcomes: how verdicts were foreseen.
    """

    def __init__(
        self,
        fallback_order: FallbackOrder | None = None,
        controller: SpeculationController | None = None,
    ) -> None:
        """`fallback_order` says what to do in a round without a candidate; by default it waits."""
        self.controller = controller or SpeculationController(None)
        self.outcomes = RecentOutcomes()
        self.drafts = DraftRegistry()
        self.assignments = Assignments(self.drafts, self.controller)
        self.intake = CandidateIntake(self.drafts, self.assignments, self.outcomes)
        self.readiness = Readiness(self.drafts, self.assignments, self.controller)
        self.verdicts = Verdicts(
            self.assignments, self.controller, fallback_order or FallbackOrder(), self.outcomes
        )
        self.feature_needs = FeatureNeeds(self.assignments)

    def attach(self, attachment: Attachment, sequences: Iterable[Sequence], now_s: float) -> None:
        """Adds a draft and hands it the running sequences that have none."""
        self.drafts.add(attachment)
        self.controller.drafts_changed()
        for sequence in sequences:
            self.assignments.assign(sequence, now_s)

    def detach(self, attachment_id: str, now_s: float) -> Attachment | None:
        """Removes a draft; its sequences move to others that have room, or go on alone."""
        attachment = self.drafts.remove(attachment_id)
        if attachment is not None:
            self.controller.drafts_changed()
            self.assignments.hand_over(attachment, now_s)
        return attachment

    def statuses(self) -> tuple[AttachmentStatus, ...]:
        """Returns the drafts, oldest first, with their tree requests."""
        return tuple(map(self._status, self.drafts.live))

    def end_step(
        self,
        reports: SequenceOf[StepReport],
        start_s: float,
        now_s: float,
        *,
        is_timed: bool = True,
    ) -> None:
        """All verdicts since `start_s` have been sent.

        Args:
            reports: of the steps that were; none where the loop only waits or fills.
            is_timed: whether the time since `start_s` is that of the step.
        """
        for report in reports:
            # Of two steps in one go it is unknown which took how long.
            is_alone = is_timed and len(reports) == 1
            duration_s = (now_s - start_s) / len(reports)
            self.controller.end_step(report, duration_s, is_timed=is_alone)
        self.controller.rest(now_s)

    def end_rest(self, now_s: float) -> None:
        """Since the end of the last step there was nothing to do but to wait."""
        self.controller.wake(now_s, was_idle=True)
        self.controller.rest(now_s)

    def _status(self, attachment: Attachment) -> AttachmentStatus:
        wishes = [each.course.asked for each in self.assignments if each.attachment is attachment]
        counts = [wish.num_outcomes for wish in wishes if wish.num_outcomes is not None]
        return AttachmentStatus(
            attachment,
            self._wanted_shape(attachment, wishes),
            sum(wish.is_paused for wish in wishes),
            tuple(self.controller.level_rates(attachment)),
            num_outcomes=max(counts, default=None),
        )

    def _wanted_shape(
        self, attachment: Attachment, wishes: SequenceOf[TreeWish]
    ) -> TreeShape | None:
        own = attachment.report.pinned_shape or attachment.base_shape
        if wishes:
            shapes = Counter(wish.shape or own for wish in wishes if not wish.is_paused)
            return shapes.most_common(1)[0][0] if shapes else None
        if attachment.report.pinned_shape is not None or not self.controller.is_adaptive:
            return own
        return self.controller.wanted_shape(attachment)
