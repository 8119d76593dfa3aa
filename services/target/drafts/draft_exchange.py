"""Messages between drafts or learners and the step loop, and whether speculation is used."""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, replace
from typing import Protocol

from services.target.drafts.attachment import (
    Attachment,
    AttachmentStatus,
    DraftMessage,
    FeatureRows,
    Idle,
    IdleReason,
    Offer,
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
from shared.tokens import OpenedSequence

logger = logging.getLogger(__name__)

# Learners train on sequences that have ended. No sequence waits for them.

MAX_UNSENT = 8
"""Most sequences that are being copied for one learner; it misses those that end meanwhile."""
FEWEST_TOKENS = 8
"""Shorter sequences are not worth a message."""


@dataclass(frozen=True, slots=True, eq=False)
class _Lesson:
    """An ended sequence for one learner, whose feature rows are being copied to the host."""

    attachment: Attachment
    opened: OpenedSequence
    rows: HostCopy


class Learners:
    """Sends learners the last tokens of ended sequences, with their features. Owned by the engine
    thread, which never waits for a copy.

    Attributes:
        num_missed: sequences for which a learner was too slow.
    """

    def __init__(self, features: FeatureFeed) -> None:
        self.num_missed = 0
        self._features = features
        self._attached: dict[str, Attachment] = {}
        self._lessons: deque[_Lesson] = deque()

    def attach(self, learner: Attachment) -> None:
        """Adds a learner. The features that it reads are stored already."""
        self._attached[learner.identity.attachment_id] = learner

    def detach(self, attachment_id: str) -> Attachment | None:
        """Removes a learner and returns it; None if there is none of that id."""
        return self._attached.pop(attachment_id, None)

    @property
    def attached(self) -> tuple[Attachment, ...]:
        """Learners, oldest first."""
        return tuple(self._attached.values())

    def drop_unsent(self) -> None:
        """Drops unsent sequences, because previous weights computed their features."""
        self._lessons.clear()

    def ended(self, sequence: Sequence) -> None:
        """Takes a sequence that has ended. It still holds its pages."""
        may_learn = sequence.lease is not None and not sequence.request.never_learnt
        if not (self._attached and may_learn) or len(sequence.token_ids) < FEWEST_TOKENS:
            return
        for learner in self._attached.values():
            if sum(lesson.attachment is learner for lesson in self._lessons) >= MAX_UNSENT:
                self.num_missed += 1
            elif (lesson := self._lesson(learner, sequence)) is not None:
                self._lessons.append(lesson)

    def send_messages(self) -> list[Attachment]:
        """Sends queued messages, and the sequences whose rows have been copied to the host. Returns
        the learners that do not keep up."""
        slow = []
        for learner in self.attached:
            message = learner.take_message()
            if message is not None and not learner.port.send(message):
                slow.append(learner)
        while self._lessons and self._lessons[0].rows.is_done:
            lesson = self._lessons.popleft()
            opened, learner = lesson.opened, lesson.attachment
            if learner.identity.attachment_id not in self._attached:
                continue
            rows = FeatureRows(
                opened.sequence_id, 0, lesson.rows.read(), num_prompt_tokens=len(opened.token_ids)
            )
            if not learner.port.send(DraftMessage(opened=[opened], features=[rows])):
                self.num_missed += 1
        return slow

    def close(self) -> None:
        """Ends every learner's stream."""
        for learner in self._attached.values():
            learner.port.close()

    def _lesson(self, learner: Attachment, sequence: Sequence) -> _Lesson | None:
        assert learner.feature_spec is not None
        end = min(sequence.num_computed, len(sequence.token_ids) - 1)
        max_rows = (learner.max_context_tokens or end + 1) - 1
        start, rows = self._features.stored_rows(
            learner.feature_spec, sequence.open_lease, max(end - max_rows, 0), end
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
    """Attaches and detaches drafts, takes their candidates, and sends them messages. Owned by the
    engine thread.

    Attributes:
        offers: queue of the candidates that drafts pushed. Other threads append to it.
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
        self._slow: list[Attachment] = []

    def attach(self, attachment: Attachment, started: Iterable[Sequence]) -> None:
        """Adds a draft or learner; refuses it where its features cannot be stored.

        Args:
            started: sequences that have left the waiting queue. Those without a draft may be
                assigned to the new one.
        """
        try:
            if attachment.feature_spec is not None:
                self._features.open(attachment.feature_spec)
        except RuntimeError as error:
            advice = self._cache.advice(Shortage.of(error))
            message = (
                f"the target has no memory for the features that the draft reads: {advice}; or "
                "start the target with --remote-draft-features 1 or more"
            )
            self._refuse(attachment, FailedPrecondition(message, reason="FEATURE_MEMORY"))
            return
        except FailedPrecondition as error:
            self._refuse(attachment, error)
            return
        if self._version.num_updates:
            attachment.outbox.weights = replace(self._version)
        if attachment.learns:
            self.learners.attach(attachment)
            return
        self.attachments.attach(attachment, started, self._clock())
        try:
            self._rounds.open(attachment)
            if attachment.rounds is None and not self._has_head:
                self._factory.map_head(attachment)
            if attachment.rounds is None and attachment.mapped is None:
                self._pushed.open(attachment)
        except RuntimeError as error:
            self._warn_of(error)

    def map_head(self, attachment_id: str, pages: SequenceOf[int]) -> None:
        """Opens rounds with the head of a draft that has prepared for them; sequences get lanes
        there from now on. Without memory for them, the draft pushes its trees.

        Args:
            pages: pages of the draft's KV cache for the rounds alone; empty if it could not
                prepare.
        """
        attachment = self.attachments.drafts.get(attachment_id)
        if attachment is None or attachment.mapped is None or attachment.rounds is not None:
            return
        name = attachment.identity.worker_id
        if pages:
            attachment.rounds = replace(attachment.mapped.source, pages=pages)
            self._pushed.settle()
            try:
                self._rounds.open(attachment)
            except RuntimeError as error:
                advice = self._cache.advice(Shortage.of(error))
                logger.warning(
                    "no memory for rounds with the head of %s, which pushes its trees: %s",
                    *(name, advice),
                )
                attachment.rounds = None
            else:
                logger.info("the head of %s takes part in rounds through mapped memory", name)
                return
        attachment.mapped.head.close()
        attachment.mapped = attachment.mapped_offer = None
        self._pushed.open(attachment)
        self._map_another_head()

    def _map_another_head(self) -> None:
        """Has the head of another draft take the place in rounds that one has left or declined."""
        for draft in self.attachments.drafts.live:
            if not self._has_head:
                self._factory.map_head(draft)

    @property
    def _has_head(self) -> bool:
        """Whether the head of a draft takes part in rounds or prepares to; only one can."""
        live = self.attachments.drafts.live
        return self._rounds.is_open or any(draft.mapped is not None for draft in live)

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
        """Removes a draft or a learner."""
        learner = self.learners.detach(attachment_id)
        if learner is not None and learner.feature_spec is not None:
            self._features.close(learner.feature_spec)
            return
        # Trees in flight count for the drafts that have their sequences now.
        self._pushed.settle()
        attachment = self.attachments.detach(attachment_id, self._clock())
        self._rounds.close(attachment)
        if attachment is not None and attachment.mapped is not None:
            attachment.mapped.head.close()
            self._map_another_head()
        if attachment is not None and attachment.feature_spec is not None:
            self._features.close(attachment.feature_spec)

    def weights_updated(self) -> None:
        """Tells drafts that the target's weights have changed: tensors that they copied and states
        that they computed from its features are stale."""
        self.learners.drop_unsent()
        for attachment in (*self.attachments.drafts.live, *self.learners.attached):
            attachment.outbox.weights = replace(self._version)

    def take_offers(self) -> None:
        """Takes candidates that drafts pushed. Called before a step, and once more before its
        verdicts, which then select from those that arrived during the forward, too."""
        while self.offers:
            self.attachments.offer(self.offers.popleft())

    def release(self, attachment_id: str, sequence_ids: SequenceOf[int]) -> None:
        """Takes sequences back from a draft."""
        self._pushed.settle()
        self.attachments.assignments.release(attachment_id, sequence_ids, self._clock())

    def send_messages(self) -> None:
        """Sends each draft one message with all that is new to it, and ends the streams of drafts
        that do not keep up."""
        lacking = self._features.lacking()
        if lacking:
            with self._pushed.aside():
                self._features.send(lacking)
        self.send_early()
        for attachment in self.attachments.drafts.live:
            is_broken = attachment.mapped is not None and attachment.mapped.head.is_broken
            if is_broken or attachment in self._slow:
                self._drop(attachment)
        self._slow.clear()
        for learner in self.learners.send_messages():
            self._drop(learner)

    def send_early(self) -> None:
        """Sends what is new to drafts in the middle of a turn, so that they can read the prompts of
        admitted sequences while the target computes them."""
        for attachment, message in self.attachments.drafts.take_messages():
            if not attachment.port.send(message):
                self._slow.append(attachment)

    def _drop(self, attachment: Attachment) -> None:
        name = "learner" if attachment.learns else "draft"
        logger.warning("%s %s does not keep up", name, attachment.identity.worker_id)
        attachment.port.close()
        self.detach(attachment.identity.attachment_id)

    def close(self) -> None:
        """Ends every draft's stream."""
        self.learners.close()
        for attachment in self.attachments.drafts.live:
            attachment.port.close()


POLL_S = 0.5
"""Time between two updates. The text of a comparison costs about 0.5 ms of a CPU."""
FIRST_LOG_PAUSE_S, LAST_LOG_PAUSE_S = 1.0, 60.0
"""Shortest time between two log lines about one draft, or about the comparison: at first, and at
most. It doubles with each line."""


class Comparison(Protocol):
    """Compares speculation with plain steps."""

    @property
    def pays(self) -> bool | None:
        """Whether speculation is faster; None while unknown."""

    def comparison(self) -> str:
        """Returns the figures behind `pays`."""


@dataclass(slots=True)
class _Logged:
    """A state that is logged when it changes; less often, the more often it changes."""

    state: str | None = None
    may_log_s: float = -math.inf
    pause_s: float = FIRST_LOG_PAUSE_S


class SpeculationState:
    """Tracks and logs whether speculation is used. Owned by the engine thread.

    Args:
        lanes: comparison of the device rounds; while it is unknown, that of the attachments counts.

    Attributes:
        detail: why no trees are verified; empty while trees are verified, or while the reason is
            unknown. Other threads may read it.
    """

    def __init__(self, attachments: Attachments, lanes: Comparison) -> None:
        self.detail = ""
        self._attachments = attachments
        self._lanes = lanes
        self._next_s = -math.inf
        # By attachment id; the state of the comparison has an empty id.
        self._logged: dict[str, _Logged] = {"": _Logged()}

    def update(self, now_s: float) -> None:
        """Updates the state at the beginning of a turn of the loop, at most every `POLL_S`; other
        calls cost one comparison."""
        if now_s < self._next_s:
            return
        self._next_s = now_s + POLL_S
        drafts = {draft.identity.attachment_id: draft for draft in self._attachments.drafts.live}
        source = self._attachments if self._lanes.pays is None else self._lanes
        if not drafts:
            self.detail = ""
        elif (pays := source.pays) is not None:
            figures = source.comparison()
            self.detail = "" if pays else f"trees bring too little here: {figures}"
            state = "on" if pays else "off"
            self._log("", state, f"speculation is {state}: {self.detail or figures}", now_s)
        for detached_id in self._logged.keys() - {"", *drafts}:
            del self._logged[detached_id]
        for attachment_id, draft in drafts.items():
            idle = _own_idle(draft, now_s)
            if idle is not None or attachment_id in self._logged:
                state = "" if idle is None else idle.reason.value
                what = "its trees arrive in time again" if idle is None else idle.detail
                self._log(attachment_id, state, f"draft {draft.identity.worker_id}: {what}", now_s)

    def explained(self, status: AttachmentStatus, now_s: float) -> AttachmentStatus:
        """Returns the status of a draft with the reason why none of its trees is verified."""
        idle = _own_idle(status.attachment, now_s)
        if idle is None and self.detail:
            idle = Idle(IdleReason.PLAIN_IS_FASTER, self.detail)
        return replace(status, idle=idle)

    def _log(self, key: str, state: str, line: str, now_s: float) -> None:
        logged = self._logged.setdefault(key, _Logged())
        if state != logged.state and now_s >= logged.may_log_s:
            logged.state, logged.may_log_s = state, now_s + logged.pause_s
            logged.pause_s = min(2.0 * logged.pause_s, LAST_LOG_PAUSE_S)
            logger.info("%s", line)


def _own_idle(draft: Attachment, now_s: float) -> Idle | None:
    """Returns why a draft cannot help now, for a reason of its own; None if it can."""
    is_mapping = draft.mapped is not None and draft.rounds is None
    if draft.warm_up.is_on(now_s) or is_mapping:
        return Idle(IdleReason.WARMING_UP, "it is warming up (CUDA graphs, kernels)")
    if draft.timeout.is_cold:
        return Idle(IdleReason.SILENT, "it does not answer; the target steps without its trees")
    return None
