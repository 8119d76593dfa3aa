"""Learners: they read sequences that have ended, and no sequence waits for them."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from services.target.drafts.attachment import Attachment, DraftMessage, OpenedSequence
from services.target.drafts.feature_rows import FeatureRows
from services.target.drafts.feature_store import FeatureFeed
from services.target.sequence import Sequence
from shared.runtime.host_copy import HostCopy

MAX_UNSENT = 8
"""Sequences on their way to one learner; it misses those that end meanwhile."""
FEWEST_TOKENS = 8
"""Shorter sequences are not worth a message."""


@dataclass(frozen=True, slots=True, eq=False)
class _Lesson:
    attachment: Attachment
    opened: OpenedSequence
    rows: HostCopy


class Learners:
    """Hands the last tokens of sequences that end, with their features, to whoever learns from
    them. Owned by the engine thread, which never waits for a copy.

    Attributes:
        num_missed: sequences that a learner was too slow for.
    """

    def __init__(self, features: FeatureFeed) -> None:
        self.num_missed = 0
        self._features = features
        self._attached: dict[str, Attachment] = {}
        self._lessons: deque[_Lesson] = deque()

    def attach(self, learner: Attachment) -> None:
        """Adds a learner whose features are kept."""
        self._attached[learner.identity.attachment_id] = learner

    def detach(self, attachment_id: str) -> Attachment | None:
        """Forgets a learner; None where there is no such."""
        return self._attached.pop(attachment_id, None)

    @property
    def attached(self) -> tuple[Attachment, ...]:
        """Learners, oldest first."""
        return tuple(self._attached.values())

    def drop_unsent(self) -> None:
        """Forgets what is on its way: other weights computed it."""
        self._lessons.clear()

    def ended(self, sequence: Sequence) -> None:
        """A sequence has ended; its pages are still its own."""
        is_known = sequence.lease is not None and not sequence.request.never_learnt
        if not (self._attached and is_known) or len(sequence.token_ids) < FEWEST_TOKENS:
            return
        for learner in self._attached.values():
            if sum(each.attachment is learner for each in self._lessons) >= MAX_UNSENT:
                self.num_missed += 1
            elif (lesson := self._lesson(learner, sequence)) is not None:
                self._lessons.append(lesson)

    def tell(self) -> None:
        """Sends what has arrived in the host's memory."""
        for learner in self.attached:
            message = learner.take_message()
            if message is not None and not learner.port.send(message):
                learner.port.close()
                self.detach(learner.identity.attachment_id)
        while self._lessons and self._lessons[0].rows.is_done:
            lesson = self._lessons.popleft()
            opened, learner = lesson.opened, lesson.attachment
            if learner.identity.attachment_id not in self._attached:
                continue
            rows = FeatureRows(
                opened.sequence_id, 0, lesson.rows.read(), num_prompt_tokens=len(opened.token_ids)
            )
            if not learner.port.send(DraftMessage((opened,), (), (), (rows,))):
                self.num_missed += 1

    def close(self) -> None:
        """Ends every learner's stream."""
        for learner in self._attached.values():
            learner.port.close()

    def _lesson(self, learner: Attachment, sequence: Sequence) -> _Lesson | None:
        assert learner.feature_spec is not None
        end = min(sequence.num_computed, len(sequence.token_ids) - 1)
        longest = (learner.max_context_tokens or end + 1) - 1
        start, rows = self._features.known_rows(
            learner.feature_spec, sequence.open_lease, max(end - longest, 0), end
        )
        token_ids = tuple(sequence.token_ids[start : end + 1])
        if len(token_ids) < FEWEST_TOKENS:
            return None
        opened = OpenedSequence(
            sequence.sequence_id,
            token_ids,
            max(sequence.num_prompt_tokens - start, 0),
            sequence.sampling,
            sequence.round,
            request_id=sequence.request.request_id,
        )
        return _Lesson(learner, opened, HostCopy(rows))
