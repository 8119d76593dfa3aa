"""Finds the rows of features that drafts lack. No torch."""

from __future__ import annotations

from dataclasses import dataclass

from services.target.drafts.assignment import Assignment
from services.target.drafts.assignments import Assignments
from services.target.drafts.attachment import Attachment
from services.target.drafts.feature_rows import FeatureRows
from services.target.sequence import Sequence


@dataclass(frozen=True, slots=True)
class FeatureNeed:
    """A sequence whose draft lacks rows that are computed.

    Attributes:
        start: first position to send; None when nothing was sent yet.
        end: the position after the last one. Of the last token, whose row is computed while it is
            decided on, the draft does not know yet.
    """

    attachment: Attachment
    sequence: Sequence
    start: int | None
    end: int


class FeatureNeeds:
    """Tracks the features sent for each sequence to its draft. Owned by the engine thread."""

    def __init__(self, assignments: Assignments) -> None:
        self._assignments = assignments

    def unmet(self) -> list[FeatureNeed]:
        """Returns the sequences with computed positions that their draft has no features of."""
        needs = (_need(each) for each in self._assignments if each.attachment.reads_features)
        return [need for need in needs if need.end > (need.start or 0)]

    def fill(self, need: FeatureNeed, rows: FeatureRows) -> None:
        """Puts rows into the draft's next message."""
        assignment = self._assignments.get(need.sequence.sequence_id)
        assert assignment is not None
        assignment.num_features_sent = rows.end
        if len(rows.rows):
            need.attachment.outbox_features.append(rows)


def _need(assignment: Assignment) -> FeatureNeed:
    sequence = assignment.sequence
    end = min(sequence.num_computed, len(sequence.token_ids) - 1)
    return FeatureNeed(assignment.attachment, sequence, assignment.num_features_sent, end)
