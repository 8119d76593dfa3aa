"""A draft whose sequences are all paused is not woken with each step."""

from __future__ import annotations

import pytest
import torch

from services.draft.events import FeaturesArrived, RoundsDecided
from services.draft.link_codec import event_from_response
from services.target.drafts.attachment import (
    MOST_HELD_VERDICTS,
    Attachment,
    DraftIdentity,
    DraftMessage,
)
from services.target.drafts.draft_messages import draft_messages
from services.target.drafts.draft_timeout import DraftTimeout
from services.target.drafts.feature_rows import FeatureRows
from shared.models.heads.feature_spec import FeatureSpec
from shared.tokens import ANY_TREE, NO_TREE, Outcome, TreeWish, Verdict


class _Port:
    def send(self, message: DraftMessage) -> bool:
        raise AssertionError("nothing is sent here")

    def close(self) -> None:
        raise AssertionError("nothing is closed here")


def _attachment() -> Attachment:
    identity = DraftIdentity("draft", "draft", "m", "SCRIPTED", 64, 0.0)
    attachment = Attachment(identity, _Port(), DraftTimeout(0.5))
    attachment.sequence_ids.add(7)
    return attachment


def _decide(attachment: Attachment, round_: int, wish: TreeWish) -> DraftMessage | None:
    verdict = Verdict(7, round_, Outcome.MISSED, (), (9,), 6 + round_, wish)
    attachment.outbox_verdicts.append(verdict)
    return attachment.take_message()


def test_verdicts_of_a_paused_sequence_go_out_together_and_in_order() -> None:
    attachment = _attachment()
    for round_ in range(MOST_HELD_VERDICTS - 1):
        assert _decide(attachment, round_, NO_TREE) is None
    message = _decide(attachment, MOST_HELD_VERDICTS - 1, NO_TREE)
    assert message is not None
    assert [each.round for each in message.verdicts] == list(range(MOST_HELD_VERDICTS))
    assert attachment.take_message() is None


def test_a_tree_that_is_wanted_is_asked_for_at_once() -> None:
    attachment = _attachment()
    assert _decide(attachment, 0, NO_TREE) is None
    message = _decide(attachment, 1, ANY_TREE)
    assert message is not None
    assert [each.round for each in message.verdicts] == [0, 1]


def test_an_end_is_told_at_once() -> None:
    attachment = _attachment()
    assert _decide(attachment, 0, NO_TREE) is None
    attachment.sequence_ids.remove(7)
    attachment.outbox_closed.append(7)
    message = attachment.take_message()
    assert message is not None
    assert (len(message.verdicts), message.closed) == (1, (7,))


def test_rows_of_several_verdicts_end_with_the_last_one() -> None:
    """What is held of a sequence is one run of rows: the draft gets those of the last verdict with
    it, and those before in front."""
    verdicts = tuple(
        Verdict(7, round_, Outcome.MISSED, (), (9,), 6 + round_) for round_ in range(3)
    )
    rows = FeatureRows(7, 2, torch.arange(5.0).unsqueeze(1), 4)
    responses = draft_messages(DraftMessage((), verdicts, (), (rows,)))
    spec = FeatureSpec((0,), torch.float32, 1)
    found = [
        (event.rows.position_offset, event.rows.rows.flatten().tolist())
        for response in responses[:-1]
        if isinstance(event := event_from_response(1, response, spec), FeaturesArrived)
    ]
    assert found == [(2, [0.0, 1.0, 2.0, 3.0])]
    told = event_from_response(1, responses[-1], spec)
    assert isinstance(told, RoundsDecided)
    assert [each.features is None for each in told.results] == [True, True, False]
    last = told.results[-1].features
    assert last is not None
    assert (last.position_offset, last.rows.flatten().tolist()) == (6, [4.0])


@pytest.mark.parametrize(
    ("first", "num_rows", "num_committed"),
    [
        pytest.param(4, 3, 1, id="read-anew-after-a-preemption"),
        pytest.param(9, 2, 3, id="the-first-ones-are-not-known"),
    ],
)
def test_rows_that_are_not_those_of_the_verdict_say_where_they_are(
    first: int, num_rows: int, num_committed: int
) -> None:
    verdict = Verdict(7, 3, Outcome.MISSED, (), (9,) * num_committed, 12)
    rows = FeatureRows(7, first, torch.arange(float(num_rows)).unsqueeze(1), 4)
    responses = draft_messages(DraftMessage((), (verdict,), (), (rows,)))
    spec = FeatureSpec((0,), torch.float32, 1)
    found = [event_from_response(1, response, spec) for response in responses]
    [arrived] = [event for event in found if isinstance(event, FeaturesArrived)]
    assert arrived.rows.position_offset == first
    assert arrived.rows.rows.flatten().tolist() == list(range(num_rows))
    [told] = [event for event in found if isinstance(event, RoundsDecided)]
    assert told.results[0].features is None
