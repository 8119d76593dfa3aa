"""Rows go out with the message that takes the verdicts behind them along."""

from __future__ import annotations

import torch

from services.target.drafts.attachment import Attachment
from services.target.drafts.attachments import Attachments
from services.target.drafts.feature_store import FeatureSpec
from services.target.sequence import Sequence
from shared.tokens import ANY_TREE, NO_TREE, TreeWish
from tests.helpers.one_draft import commit, make_attachment, make_sequence


class _Pair:
    """Two sequences at a draft that reads features; none is computed yet."""

    def __init__(self) -> None:
        self.attachments = Attachments()
        self.draft: Attachment = make_attachment()
        self.draft.feature_spec = FeatureSpec("spec", (0,), torch.float32, None)
        self.sequences = [make_sequence(1), make_sequence(2)]
        self.attachments.attach(self.draft, self.sequences, 0.0)
        self.draft.take_message()

    def wish(self, sequence: Sequence, wish: TreeWish) -> None:
        assignment = self.attachments.assignments.get(sequence.sequence_id)
        assert assignment is not None
        assignment.course.wish = assignment.course.asked = wish

    def plain(self, sequence: Sequence) -> None:
        sequence.num_computed = len(sequence.token_ids)
        commit(self.attachments, sequence, (9,), accepted=(), was_verified=False, now_s=0.0)

    @property
    def lacking(self) -> list[int]:
        return [need.sequence.sequence_id for need in self.attachments.feature_needs.unmet()]


def test_rows_of_another_sequence_take_those_that_are_held_along() -> None:
    pair = _Pair()
    held, read = pair.sequences
    pair.wish(held, NO_TREE)
    pair.wish(read, ANY_TREE)
    pair.plain(held)
    assert pair.lacking == []
    read.num_computed = 1
    assert pair.lacking == [1, 2]


def test_rows_of_paused_sequences_are_held() -> None:
    pair = _Pair()
    for sequence in pair.sequences:
        pair.wish(sequence, NO_TREE)
        pair.plain(sequence)
    assert pair.draft.outbox_verdicts
    assert pair.lacking == []
