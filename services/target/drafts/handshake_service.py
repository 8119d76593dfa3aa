"""The handshake with a draft: checks `Attach`, opens shared memory, answers with the terms."""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from dataclasses import dataclass

from services.target.drafts.assignment import MAX_CONDITIONAL_CANDIDATES
from services.target.drafts.attachment import Attachment, DraftIdentity, MappedOffer
from services.target.drafts.attachment_terms import AttachmentTerms
from services.target.drafts.draft_messages import feature_spec, ring_message
from services.target.drafts.draft_stream import DraftStream
from services.target.drafts.draft_timeout import DraftTimeout
from services.target.drafts.hidden_state_sender import RingSender
from services.target.drafts.learners import MAX_UNSENT
from services.target.engine import Engine
from services.target.requests.generate_service import ServedModel
from services.target.verifier import VerificationMode
from shared.errors import FailedPrecondition, InvalidArgument
from shared.pb.outrider.speculation.v1 import speculation_service_pb2 as pb
from shared.rpc.lifecycle import Lifecycle
from shared.rpc.requests import shape_from_message
from shared.runtime.device import device_id
from shared.runtime.feature_ring import FeatureRings, FeatureRingWriter
from shared.runtime.outcome_chains import MAX_OUTCOMES
from shared.runtime.ring_memory import RingUnavailable, host_id

logger = logging.getLogger(__name__)
_LONGEST_NAME = 256
_MODES = {
    VerificationMode.COUPLED: pb.VERIFICATION_MODE_COUPLED,
    VerificationMode.POINT_MASS: pb.VERIFICATION_MODE_POINT_MASS,
    # Trees on the wire carry no distributions, so they are point masses.
    VerificationMode.REJECTION: pb.VERIFICATION_MODE_POINT_MASS,
    VerificationMode.BLOCK: pb.VERIFICATION_MODE_POINT_MASS,
}


@dataclass(frozen=True, slots=True)
class AcceptedDraft:
    """A draft that passed the handshake.

    Attributes:
        stream: queue of messages to it.
        ring: shared memory from which it reads hidden states; None if messages carry them.
        attached: the answer to its `Attach`.
    """

    attachment: Attachment
    stream: DraftStream
    ring: FeatureRingWriter | None
    attached: pb.Attached


class Handshake:
    """Accepts the drafts of one engine. Runs on the event loop."""

    def __init__(
        self, engine: Engine, model: ServedModel, terms: AttachmentTerms, lifecycle: Lifecycle
    ) -> None:
        self._engine = engine
        self._model = model
        self._terms = terms
        self._lifecycle = lifecycle
        self._ids = itertools.count(1)
        self._rings = FeatureRings(engine.device)

    def accept(self, attach: pb.Attach) -> AcceptedDraft:
        """Returns the draft, which is not attached to the engine yet; `release` it at the end.

        Raises:
            OutriderError: it cannot draft for this target, or the target is draining.
        """
        self._lifecycle.check_open()
        self._check(attach)
        attachment, stream = self._attachment(attach)
        ring = self._open_ring(attach, attachment)
        return AcceptedDraft(attachment, stream, ring, self._attached(attachment, ring))

    def release(self, draft: AcceptedDraft) -> None:
        """Closes the shared memory of a draft."""
        if draft.ring is not None:
            self._rings.close(draft.ring)

    def _attachment(self, attach: pb.Attach) -> tuple[Attachment, DraftStream]:
        most_queued = MAX_UNSENT if attach.learns else self._terms.max_queued_messages
        stream = DraftStream(asyncio.get_running_loop(), most_queued)
        identity = DraftIdentity(
            attachment_id=f"attachment-{next(self._ids)}",
            worker_id=attach.worker_id,
            model_id=attach.model_id,
            algorithm=attach.algorithm,
            max_sequences=min(attach.max_sequence_count, self._terms.max_sequences),
            attach_time_s=time.time(),
            shape=shape_from_message(attach.shape) if attach.HasField("shape") else None,
        )
        spec = feature_spec(attach.feature_spec) if attach.HasField("feature_spec") else None
        timeout = DraftTimeout(self._terms.longest_wait_s)
        attachment = Attachment(
            identity,
            stream,
            timeout,
            spec,
            learns=attach.learns,
            max_context_tokens=attach.max_context_token_count or None,
            mapped_offer=self._mapped_offer(attach),
        )
        return attachment, stream

    def _mapped_offer(self, attach: pb.Attach) -> MappedOffer | None:
        """Returns the offer of a draft that can map the target's memory, and has another device."""
        offer, engine = attach.mapped_head, self._engine
        if not attach.HasField("mapped_head"):
            return None
        own_id = device_id(engine.device)
        is_near = bool(offer.host_id) and offer.host_id == host_id()
        if bool(offer.device_id) != bool(own_id):
            is_near = False
        if not is_near or (own_id and offer.device_id == own_id):
            return None
        if offer.page_size != engine.page_size:
            logger.warning(
                "%s pushes its trees: its pages hold %d tokens, the target's %d",
                *(attach.worker_id, offer.page_size, engine.page_size),
            )
            return None
        return MappedOffer(
            offer.vocab_size,
            offer.max_context_token_count,
            offer.shape_pinned,
            min(offer.outcome_count, MAX_OUTCOMES),
        )

    def _check(self, attach: pb.Attach) -> None:
        known = self._model.tokenizer_sha256
        if attach.tokenizer_sha256 and attach.tokenizer_sha256 != known:
            raise FailedPrecondition.tokenizer_mismatch(attach.tokenizer_sha256, known)
        for name in ("worker_id", "model_id", "algorithm"):
            length = len(getattr(attach, name))
            if length > _LONGEST_NAME:
                message = f"{name} has {length:,} characters; at most {_LONGEST_NAME} are accepted"
                raise InvalidArgument.of("ATTACH_OUT_OF_RANGE", name, message)
        if attach.learns and not attach.HasField("feature_spec"):
            message = "a learner reads features; feature_spec is missing"
            raise InvalidArgument.of("ATTACH_OUT_OF_RANGE", "feature_spec", message)
        _check_least("max_sequence_count", attach.max_sequence_count, 1)
        _check_least("max_node_count", attach.max_node_count, 1)
        if attach.HasField("mapped_head"):
            offer = attach.mapped_head
            _check_least("mapped_head.vocab_size", offer.vocab_size, 1)
            _check_least("mapped_head.max_context_token_count", offer.max_context_token_count, 2)
            _check_least("mapped_head.outcome_count", offer.outcome_count, 0)

    def _open_ring(self, attach: pb.Attach, attachment: Attachment) -> FeatureRingWriter | None:
        """Shares memory with a draft of this host that can read it; None leaves bytes."""
        spec, offer = attachment.feature_spec, attach.feature_ring
        is_readable = offer.host_id and offer.host_id == host_id()
        if self._rings.is_on_cuda and not offer.reads_cuda:
            is_readable = False
        if spec is None or not is_readable or not self._terms.feature_ring_rows:
            return None
        width = self._engine.feature_width(spec)
        try:
            ring = self._rings.open(self._terms.feature_ring_rows, width, spec.dtype)
        except RingUnavailable as error:
            logger.warning("features go to %s as bytes: %s", attach.worker_id, error)
            return None
        attachment.sender = RingSender(ring)
        return ring

    def _attached(self, attachment: Attachment, ring: FeatureRingWriter | None) -> pb.Attached:
        limits, spec = self._engine.limits, attachment.feature_spec
        width = 0 if spec is None else self._engine.feature_width(spec)
        attached = pb.Attached(
            attachment_id=attachment.identity.attachment_id,
            max_node_count=self._terms.max_nodes,
            max_sequence_count=attachment.identity.max_sequences,
            verification_mode=_MODES[self._terms.mode],
            max_context_token_count=limits.max_sequence_tokens,
            vocab_size=limits.vocab_size,
            max_conditional_candidate_count=MAX_CONDITIONAL_CANDIDATES,
            feature_width=width,
            feature_ring=None if ring is None else ring_message(ring),
        )
        attached.candidate_wait_duration.FromNanoseconds(round(self._terms.longest_wait_s * 1e9))
        return attached


def _check_least(name: str, value: int, least: int) -> None:
    if value < least:
        raise InvalidArgument.of(
            "ATTACH_OUT_OF_RANGE", name, f"{name} is {value}; at least {least}"
        )
