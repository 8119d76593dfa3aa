"""One attached draft: its identity, its counters and its outgoing message. No torch."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from services.target.drafts.draft_policy import ALWAYS, DraftPolicy
from services.target.drafts.draft_timeout import DraftTimeout, DraftWarmUp
from services.target.drafts.feature_rows import FeatureRows
from services.target.drafts.hidden_state_sender import HiddenStateSender, InlineSender
from services.target.drafts.outcome_tally import OutcomeTally
from shared.candidate_columns import CandidateColumns
from shared.tokens import (
    ANY_TREE,
    NO_REPORT,
    DraftReport,
    SamplingParams,
    TreeRequest,
    TreeShape,
    Verdict,
)

if TYPE_CHECKING:
    from services.target.drafts.feature_store import FeatureSpec
    from services.target.rounds.mapped_heads import MappedRounds
    from services.target.rounds.round_source import RoundSource
    from services.target.sequence import Sequence
    from services.target.weight_version import WeightVersion
    from shared.errors import OutriderError
    from shared.runtime.mapped_rounds import MappedCommand


SHORTEST_RESPONSE_S = 0.001
"""Drafts that answer sooner count as equally fast."""

UNSAID_SHAPE = TreeShape(3, 1, 4)
"""Taken for the shape of a draft that did not say."""


@dataclass(frozen=True, slots=True)
class OpenedSequence:
    """A sequence as it is handed to a draft."""

    sequence_id: int
    token_ids: tuple[int, ...]
    num_prompt_tokens: int
    sampling: SamplingParams
    round: int
    tree_request: TreeRequest = ANY_TREE
    request_id: str = ""
    traceparent: str | None = None
    cache_salt: str = ""


@dataclass(frozen=True, slots=True)
class DraftMessage:
    """The message to one draft after one step. At most one a step, whatever the batch.

    Attributes:
        features: rows of newly computed positions, without gaps from a sequence's first row on;
            a sequence's rows come no later than the verdict that commits what follows them.
        weights: those in force now, where the draft has not heard of them; it is told behind what
            is closed.
        commands: to a head in mapped rounds.
    """

    opened: tuple[OpenedSequence, ...]
    verdicts: tuple[Verdict, ...]
    closed: tuple[int, ...]
    features: tuple[FeatureRows, ...] = ()
    weights: WeightVersion | None = None
    commands: tuple[MappedCommand, ...] = ()


@dataclass(frozen=True, slots=True)
class MappedOffer:
    """A draft's head that can take part in rounds through mapped memory.

    Attributes:
        vocab_size: tokens that it can propose.
        max_context_tokens: longest sequence that a round may start from.
        is_pinned: an operator fixed the shape of its trees.
        num_outcomes: verdicts of a sequence that it can prepare chains for; 0 for none.
    """

    vocab_size: int
    max_context_tokens: int
    is_pinned: bool
    num_outcomes: int = 0


@dataclass(frozen=True, slots=True)
class Offer:
    """Candidates that one draft pushed, with what it says of itself.

    Attributes:
        arrived_s: by the engine's clock; it may be computing a step then.
    """

    attachment_id: str
    candidates: CandidateColumns
    report: DraftReport
    arrived_s: float


class DraftPort(Protocol):
    """The way to one draft. Called on the engine thread; must not block."""

    def send(self, message: DraftMessage) -> bool:
        """Queues a message; False says that the draft does not keep up and is to be detached."""

    def close(self) -> None:
        """Ends the stream; called once, when the target detaches the draft."""


@dataclass(frozen=True, slots=True)
class DraftIdentity:
    """The identity of an attached draft.

    Attributes:
        shape: of its trees while no other is wanted; None when it did not say.
    """

    attachment_id: str
    worker_id: str
    model_id: str
    algorithm: str
    max_sequences: int
    attach_time_s: float
    shape: TreeShape | None = None


@dataclass(slots=True)
class AttachmentCounters:
    """Life-long counters of one attachment."""

    num_verified_rounds: int = 0
    num_accepted: int = 0
    num_missed_rounds: int = 0
    num_stale_candidates: int = 0


class IdleReason(enum.Enum):
    """The reason why no tree of a draft is verified. The values are labels of metrics."""

    PLAIN_IS_FASTER = "plain_is_faster"
    SILENT = "silent"
    WARMING_UP = "warming_up"


@dataclass(frozen=True, slots=True)
class Idle:
    """A draft whose trees are not verified.

    Attributes:
        detail: a sentence for operators, with figures.
    """

    reason: IdleReason
    detail: str


@dataclass(frozen=True, slots=True)
class AttachmentStatus:
    """A draft with what the target wants of it.

    Attributes:
        shape: of the trees that most of its sequences are to have, or would have if it had any;
            None while no tree is wanted.
        num_paused: its sequences that go without trees.
        level_rates: acceptance by level.
        num_outcomes: most verdicts that it is asked to prepare for; None where that is left to it.
        idle: why none of its trees is verified; None while they are, or before that is known.
    """

    attachment: Attachment
    shape: TreeShape | None
    num_paused: int
    level_rates: tuple[float, ...]
    num_outcomes: int | None = None
    idle: Idle | None = None


@dataclass(slots=True, eq=False)
class Attachment:
    """One live draft. Owned by the engine thread.

    Attributes:
        feature_spec: hidden states it reads; None for token-level drafts.
        report: what it last said of itself.
        sender: sends it hidden states.
        outcomes: how well it foresees verdicts, over its life.
        policy: what drafts of its kind are asked for; set when it is added.
        warm_up: whether it makes CUDA graphs or compiles kernels now.
        rounds: its head and pages, for rounds on the device; None where it drafts by itself.
        mapped_offer: its head could take part in rounds from its own process.
        mapped: these rounds, from when they are begun to be opened.
        refusal: why it was not added; set before its port is closed.
        learns: it is told of sequences that have ended, and drafts for none.
        max_context_tokens: of these sequences, that it wants at most; None for all.
    """

    identity: DraftIdentity
    port: DraftPort
    timeout: DraftTimeout
    feature_spec: FeatureSpec | None = None
    sender: HiddenStateSender = field(default_factory=InlineSender)
    rounds: RoundSource | None = None
    mapped_offer: MappedOffer | None = None
    mapped: MappedRounds | None = None
    refusal: OutriderError | None = None
    learns: bool = False
    max_context_tokens: int | None = None
    report: DraftReport = NO_REPORT
    counters: AttachmentCounters = field(default_factory=AttachmentCounters)
    outcomes: OutcomeTally = field(default_factory=OutcomeTally)
    policy: DraftPolicy = field(init=False)
    warm_up: DraftWarmUp = field(default_factory=DraftWarmUp)
    sequence_ids: set[int] = field(default_factory=set)
    released: set[int] = field(default_factory=set)
    outbox_opened: list[OpenedSequence] = field(default_factory=list)
    outbox_verdicts: list[Verdict] = field(default_factory=list)
    outbox_closed: list[int] = field(default_factory=list)
    outbox_features: list[FeatureRows] = field(default_factory=list)
    outbox_weights: WeightVersion | None = None

    def __post_init__(self) -> None:
        self.policy = DraftPolicy(self.base_shape, always_up_to=ALWAYS)

    @property
    def kind(self) -> tuple[str, str, TreeShape]:
        """Drafts of one kind propose alike: those of one algorithm, model and shape."""
        return self.identity.algorithm, self.identity.model_id, self.base_shape

    @property
    def reads_features(self) -> bool:
        return self.feature_spec is not None

    @property
    def is_mapping(self) -> bool:
        """Whether its head prepares for rounds in mapped memory."""
        return self.mapped is not None and self.rounds is None

    @property
    def is_elsewhere(self) -> bool:
        """Whether it reads nothing that the target's device has yet to write."""
        return self.feature_spec is None or self.sender.hands_over

    @property
    def base_shape(self) -> TreeShape:
        """The shape of its trees while no other is wanted."""
        return self.identity.shape or UNSAID_SHAPE

    @property
    def load(self) -> tuple[float, int]:
        """Orders drafts by how long they would keep one sequence more waiting."""
        size = len(self.sequence_ids) + 1
        return size * max(self.timeout.response_s or 0.0, SHORTEST_RESPONSE_S), size

    def is_silent(self, now_s: float) -> bool:
        """Whether it does not answer, and is not tried again yet."""
        return self.timeout.has_no_chance(now_s)

    def is_avoided(self, now_s: float) -> bool:
        """Whether other drafts come first for a sequence: it is silent, or one that it has already
        is to show whether it answers again."""
        return self.timeout.is_cold and (bool(self.sequence_ids) or self.is_silent(now_s))

    @property
    def has_room(self) -> bool:
        return len(self.sequence_ids) < self.identity.max_sequences

    def takes(self, sequence: Sequence) -> bool:
        """Whether a sequence may be handed to it: there is room, both sides want it."""
        wanted = sequence.request.draft_algorithm
        return (
            self.has_room
            and sequence.sequence_id not in self.released
            and wanted in (None, self.identity.algorithm)
        )

    def close(self, sequence_id: int) -> None:
        """A sequence has ended or goes elsewhere. What the draft was not told of yet it never hears
        of: closed sequences come first in a message, those opened after them."""
        opened = [each for each in self.outbox_opened if each.sequence_id != sequence_id]
        if len(opened) == len(self.outbox_opened):
            self.outbox_closed.append(sequence_id)
            return
        self.outbox_opened = opened
        self.outbox_verdicts = [e for e in self.outbox_verdicts if e.sequence_id != sequence_id]
        self.outbox_features = [e for e in self.outbox_features if e.sequence_id != sequence_id]

    @property
    def is_due(self) -> bool:
        """Whether there is anything to tell."""
        outboxes = self.outbox_opened, self.outbox_closed, self.outbox_features
        has_verdicts = bool(self.outbox_verdicts)
        return has_verdicts or any(outboxes) or self.outbox_weights is not None

    def take_message(self) -> DraftMessage | None:
        """Empties the outbox; None while there is nothing in it."""
        if not self.is_due:
            return None
        outboxes: tuple[list[Any], ...] = (
            self.outbox_opened,
            self.outbox_verdicts,
            self.outbox_closed,
            self.outbox_features,
        )
        opened, verdicts, closed, features = (tuple(outbox) for outbox in outboxes)
        message = DraftMessage(opened, verdicts, closed, features, self.outbox_weights)
        self.outbox_weights = None
        for outbox in outboxes:
            outbox.clear()
        return message
