"""Which rows of features a draft lacks."""

from __future__ import annotations

import torch

from services.target.drafts.attachment import Attachment
from services.target.drafts.attachments import Attachments
from services.target.drafts.feature_store import FeatureSpec
from services.target.sequence import Sequence
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

    def plain(self, sequence: Sequence) -> None:
        sequence.num_computed = len(sequence.token_ids)
        commit(self.attachments, sequence, (9,), accepted=(), was_verified=False, now_s=0.0)

    @property
    def lacking(self) -> list[int]:
        places = self.attachments.assignments
        return [each.sequence.sequence_id for each in places if each.lacks_features]


def test_what_is_computed_but_for_the_last_token_is_lacking() -> None:
    pair = _Pair()
    first, second = pair.sequences
    assert pair.lacking == [], "nothing is computed yet"
    second.num_computed = 1
    assert pair.lacking == [second.sequence_id]
    pair.plain(first)
    assert pair.lacking == [first.sequence_id, second.sequence_id]


def test_what_was_sent_is_not_lacking() -> None:
    pair = _Pair()
    first, _ = pair.sequences
    pair.plain(first)
    place = pair.attachments.assignments.get(first.sequence_id)
    assert place is not None
    assert place.num_features == 2
    place.num_features_sent = 2
    assert pair.lacking == []
