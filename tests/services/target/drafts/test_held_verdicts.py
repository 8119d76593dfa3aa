"""A draft whose sequences are all paused is not woken with each step."""

from __future__ import annotations

from services.target.drafts.attachment import (
    MOST_HELD_VERDICTS,
    Attachment,
    DraftIdentity,
    DraftMessage,
)
from services.target.drafts.patience import Patience
from shared.tokens import ANY_TREE, NO_TREE, Outcome, TreeWish, Verdict


class _Port:
    def send(self, message: DraftMessage) -> bool:
        raise AssertionError("nothing is sent here")

    def close(self) -> None:
        raise AssertionError("nothing is closed here")


def _attachment() -> Attachment:
    identity = DraftIdentity("draft", "draft", "m", "SCRIPTED", 64, 0.0)
    attachment = Attachment(identity, _Port(), Patience(0.5))
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
