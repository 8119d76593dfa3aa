"""One attached draft: who it is, what it counted, what it will be told. No torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from services.target.feature_rows import FeatureRows
from services.target.patience import Patience
from shared.tokens import SamplingParams, Verdict

if TYPE_CHECKING:
    from services.target.feature_store import FeatureSpec


@dataclass(frozen=True, slots=True)
class OpenedSequence:
    """A sequence as it is handed to a draft."""

    sequence_id: int
    token_ids: tuple[int, ...]
    num_prompt_tokens: int
    sampling: SamplingParams
    round: int


@dataclass(frozen=True, slots=True)
class DraftMessage:
    """What one draft is told after one step. At most one a step, whatever the batch.

    Attributes:
        features: rows of newly computed positions, without gaps from a sequence's first row on;
            a sequence's rows come no later than the verdict that commits what follows them.
    """

    opened: tuple[OpenedSequence, ...]
    verdicts: tuple[Verdict, ...]
    closed: tuple[int, ...]
    features: tuple[FeatureRows, ...] = ()


class DraftPort(Protocol):
    """The way to one draft. Called on the engine thread; must not block."""

    def send(self, message: DraftMessage) -> bool:
        """Queues a message; False says that the draft does not keep up and is to be detached."""

    def close(self) -> None:
        """Ends the stream; called once, when the target detaches the draft."""


@dataclass(frozen=True, slots=True)
class DraftIdentity:
    """Who attached."""

    attachment_id: str
    worker_id: str
    model_id: str
    algorithm: str
    max_sequences: int
    attach_time_s: float


@dataclass(slots=True)
class AttachmentCounters:
    """Life-long counters of one attachment."""

    num_verified_rounds: int = 0
    num_accepted: int = 0
    num_missed_rounds: int = 0
    num_stale_candidates: int = 0


@dataclass(slots=True, eq=False)
class Attachment:
    """One live draft. Owned by the engine thread.

    Attributes:
        feature_spec: hidden states it reads; None for token-level drafts.
        wants_host_rows: False leaves feature rows on the target's device, for a draft in the
            same process.
    """

    identity: DraftIdentity
    port: DraftPort
    patience: Patience
    feature_spec: FeatureSpec | None = None
    wants_host_rows: bool = True
    counters: AttachmentCounters = field(default_factory=AttachmentCounters)
    sequence_ids: set[int] = field(default_factory=set)
    released: set[int] = field(default_factory=set)
    outbox_opened: list[OpenedSequence] = field(default_factory=list)
    outbox_verdicts: list[Verdict] = field(default_factory=list)
    outbox_closed: list[int] = field(default_factory=list)
    outbox_features: list[FeatureRows] = field(default_factory=list)

    @property
    def has_room(self) -> bool:
        return len(self.sequence_ids) < self.identity.max_sequences

    def take_message(self) -> DraftMessage | None:
        """Empties the outbox."""
        outboxes: tuple[list[Any], ...] = (
            self.outbox_opened,
            self.outbox_verdicts,
            self.outbox_closed,
            self.outbox_features,
        )
        if not any(outboxes):
            return None
        message = DraftMessage(*(tuple(outbox) for outbox in outboxes))
        for outbox in outboxes:
            outbox.clear()
        return message
