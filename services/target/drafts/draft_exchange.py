"""Messages between drafts or learners and the step loop."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, replace

from services.target.drafts.attachment import (
    Attachment,
    DraftMessage,
    FeatureRows,
    Offer,
    OpenedSequence,
)
from services.target.drafts.attachments import Attachments
from services.target.drafts.feature_store import FeatureFeed
from services.target.rounds.head_rounds import HeadSteps
from services.target.rounds.pushed_rounds import PushedSteps
from services.target.rounds.round_factory import RoundFactory
from services.target.sequence import Sequence
from services.target.step_report import Clock
from services.target.weight_control import WeightVersion
from shared.errors import FailedPrecondition
from shared.runtime.host_copy import HostCopy
from shared.runtime.memory import CacheSize, Shortage

logger = logging.getLogger(__name__)

# Learners: they read sequences that have ended, and no sequence waits for them.

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


class DraftExchange:
    """Takes requests and candidates of drafts, and sends their messages. Owned by the engine
    thread.

    Attributes:
        offers: what drafts pushed and nobody took yet. Other threads append to it.
        learners: attachments that train on ended sequences.
    """

    def __init__(
        self,
        attachments: Attachments,
        features: FeatureFeed,
        rounds: HeadSteps,
        pushed: PushedSteps,
        clock: Clock,
        cache: CacheSize,
        version: WeightVersion,
        factory: RoundFactory,
    ) -> None:
        self.offers: deque[Offer] = deque()
        self.learners = Learners(features)
        self.attachments = attachments
        self._features = features
        self._rounds = rounds
        self._pushed = pushed
        self._clock = clock
        self._cache = cache
        self._version = version
        self._factory = factory

    def attach(self, attachment: Attachment, started: Iterable[Sequence]) -> None:
        """Adds a draft and hands it the sequences that have left the queue and have none; one whose
        features there is no memory for is refused."""
        try:
            if attachment.feature_spec is not None:
                self._features.open(attachment.feature_spec)
        except RuntimeError as error:
            advice = self._cache.advice(Shortage.of(error))
            message = f"the target has no memory for the features that the draft reads: {advice}"
            self._refuse(attachment, FailedPrecondition(message, reason="FEATURE_MEMORY"))
            return
        except FailedPrecondition as error:
            self._refuse(attachment, error)
            return
        if self._version.num_updates:
            attachment.outbox_weights = replace(self._version)
        if attachment.learns:
            self.learners.attach(attachment)
            return
        self.attachments.attach(attachment, started, self._clock())
        try:
            self._rounds.open(attachment)
            if attachment.rounds is None and not self._is_taken:
                self._factory.map_head(attachment)
            if attachment.rounds is None and attachment.mapped is None:
                self._pushed.open(attachment)
        except RuntimeError as error:
            self._warn_of(error)

    def map_head(self, attachment_id: str, pages: SequenceOf[int]) -> None:
        """A draft's head is ready for rounds: its sequences get lanes there from now on.

        Args:
            pages: of its KV cache, for the rounds alone; none where it could not prepare.
        """
        attachment = self.attachments.drafts.get(attachment_id)
        if attachment is None or attachment.mapped is None or not attachment.is_mapping:
            return
        if not pages:
            attachment.mapped.head.close()
            attachment.mapped = None
            self._pushed.open(attachment)
            return
        attachment.rounds = replace(attachment.mapped.source, pages=pages)
        self._pushed.settle()
        try:
            self._rounds.open(attachment)
        except RuntimeError as error:
            self._warn_of(error)
            return
        name = attachment.identity.worker_id
        logger.info("the head of %s takes part in rounds through mapped memory", name)

    @property
    def _is_taken(self) -> bool:
        """Whether the model of a draft takes part in rounds, or is preparing to; one can."""
        live = self.attachments.drafts.live
        return self._rounds.is_open or any(each.mapped is not None for each in live)

    def _map_next(self) -> None:
        """The draft has left whose model took part: another one may take its place."""
        for each in self.attachments.drafts.live:
            if not self._is_taken:
                self._factory.map_head(each)

    def _warn_of(self, error: RuntimeError) -> None:
        logger.warning(
            "no memory for rounds on the device, the host leads them: %s",
            self._cache.advice(Shortage.of(error)),
        )

    def _refuse(self, attachment: Attachment, error: FailedPrecondition) -> None:
        logger.error("draft %s is refused: %s", attachment.identity.worker_id, error.message)
        attachment.refusal = error
        attachment.port.close()

    def detach(self, attachment_id: str) -> None:
        """Forgets a draft or a learner."""
        learner = self.learners.detach(attachment_id)
        if learner is not None and learner.feature_spec is not None:
            self._features.close(learner.feature_spec)
            return
        # The trees under way belong to the drafts that have the sequences now.
        self._pushed.settle()
        attachment = self.attachments.detach(attachment_id, self._clock())
        self._rounds.close(attachment)
        if attachment is not None and attachment.mapped is not None:
            attachment.mapped.head.close()
            self._map_next()
        if attachment is not None and attachment.feature_spec is not None:
            self._features.close(attachment.feature_spec)

    def weights_updated(self) -> None:
        """The target has other weights: the tensors that drafts copied, and states computed from
        its features, are stale."""
        self.learners.drop_unsent()
        for attachment in (*self.attachments.drafts.live, *self.learners.attached):
            attachment.outbox_weights = replace(self._version)

    def take_offers(self) -> None:
        """Takes candidates that drafts pushed. Called before a step, and once more before its
        verdicts, so that what arrived during the forward is selected from."""
        while self.offers:
            self.attachments.offer(self.offers.popleft())

    def release(self, attachment_id: str, sequence_ids: SequenceOf[int]) -> None:
        """Takes sequences back from a draft."""
        self._pushed.settle()
        self.attachments.assignments.release(attachment_id, sequence_ids, self._clock())

    def tell(self) -> None:
        """Sends each draft what it does not know yet, in one message."""
        unmet = self._features.unmet()
        if unmet:
            with self._pushed.aside():
                self._features.send(unmet)
        for attachment, message in self.attachments.drafts.take_messages():
            if not attachment.port.send(message):
                self._give_up(attachment)
        for attachment in self.attachments.drafts.live:
            if attachment.mapped is not None and attachment.mapped.head.is_broken:
                self._give_up(attachment)
        self.learners.tell()

    def _give_up(self, attachment: Attachment) -> None:
        logger.warning("draft %s does not keep up", attachment.identity.worker_id)
        attachment.port.close()
        self.detach(attachment.identity.attachment_id)

    def close(self) -> None:
        """Ends every draft's stream."""
        self.learners.close()
        for attachment in self.attachments.drafts.live:
            attachment.port.close()
