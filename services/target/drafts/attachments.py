"""The attached drafts, their assignments and their candidates. No torch.

A draft is an accelerator: everything here may be late, stale, duplicated or gone, and the target
steps all the same.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf

from services.target.adaptive_config import AdaptiveConfig
from services.target.drafts.assignment import Assignment
from services.target.drafts.assignments import Assignments
from services.target.drafts.attachment import Attachment, AttachmentStatus
from services.target.drafts.candidate_intake import CandidateIntake
from services.target.drafts.draft_registry import DraftRegistry
from services.target.drafts.feature_needs import FeatureNeeds
from services.target.drafts.outcome_tally import RecentOutcomes
from services.target.drafts.readiness import Readiness
from services.target.drafts.verdicts import Verdicts
from services.target.sequence import Sequence
from shared.tokens import TreeShape


class Attachments:
    """All that the engine does with drafts. Owned by the engine thread.

    Args:
        config: trees to choose from; None leaves a draft its own.
        waits_always: trees are wanted of every draft, whatever they bring.

    Attributes:
        drafts: who is attached.
        assignments: which sequence is at which draft, with which tree.
        intake: takes what drafts push.
        readiness: says which sequences step now.
        verdicts: sends drafts the committed tokens.
        feature_needs: which drafts lack rows of features.
        outcomes: how verdicts were foreseen.
    """

    def __init__(self, config: AdaptiveConfig | None = None, *, waits_always: bool = True) -> None:
        self.outcomes = RecentOutcomes()
        self.drafts = DraftRegistry(config, waits_always=waits_always)
        self.assignments = Assignments(self.drafts)
        self.intake = CandidateIntake(self.drafts, self.assignments, self.outcomes)
        self.readiness = Readiness(self.drafts, self.assignments)
        self.verdicts = Verdicts(self.drafts, self.assignments, self.outcomes)
        self.feature_needs = FeatureNeeds(self.assignments)

    @property
    def pays(self) -> bool | None:
        """Whether trees of any kind of draft are faster than plain steps; None while unknown."""
        known = [each.pays for each in self.drafts.policies if each.pays is not None]
        return any(known) if known else None

    def comparison(self) -> str:
        """Returns the figures behind `pays`."""
        known = [each for each in self.drafts.policies if each.pays is not None]
        return "; ".join(each.comparison() for each in known)

    def attach(self, attachment: Attachment, sequences: Iterable[Sequence], now_s: float) -> None:
        """Adds a draft and hands it the running sequences that have none."""
        self.drafts.add(attachment)
        for sequence in sequences:
            self.assignments.assign(sequence, now_s)

    def detach(self, attachment_id: str, now_s: float) -> Attachment | None:
        """Removes a draft; its sequences move to others that have room, or go on alone."""
        attachment = self.drafts.remove(attachment_id)
        if attachment is not None:
            self.assignments.hand_over(attachment, now_s)
        return attachment

    def statuses(self) -> tuple[AttachmentStatus, ...]:
        """Returns the drafts, oldest first, with their tree requests."""
        return tuple(map(self._status, self.drafts.live))

    def _status(self, attachment: Attachment) -> AttachmentStatus:
        own = [each for each in self.assignments if each.attachment is attachment]
        counts = [count for each in own if (count := each.asked.num_outcomes) is not None]
        return AttachmentStatus(
            attachment,
            _wanted_shape(attachment, own),
            sum(each.asked.is_paused for each in own),
            tuple(attachment.policy.level_rates()),
            num_outcomes=max(counts, default=None),
        )


def _wanted_shape(attachment: Attachment, own: SequenceOf[Assignment]) -> TreeShape | None:
    """Returns the shape that most sequences ask for, or would; None while no tree is wanted."""
    pinned = attachment.report.pinned_shape
    if own:
        base = pinned or attachment.base_shape
        asked = [each.asked for each in own if not each.asked.is_paused]
        shapes = Counter(wish.shape or base for wish in asked)
        return shapes.most_common(1)[0][0] if shapes else None
    return pinned or attachment.policy.choice
