"""The attached drafts: identity, counters, outgoing messages, terms, and the timeout of each one's
trees. No torch."""

from __future__ import annotations

import asyncio
import enum
import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Protocol

from services.target.adaptive_config import AdaptiveConfig
from services.target.drafts.draft_policy import ALWAYS, DraftPolicy
from services.target.step_report import OutcomeTally
from services.target.throughput import CostTable
from shared.candidate_columns import CandidateColumns
from shared.errors import InvalidArgument
from shared.tokens import (
    NO_REPORT,
    DraftReport,
    OpenedSequence,
    TreeShape,
    Verdict,
)

if TYPE_CHECKING:
    from torch import Tensor

    from services.target.drafts.feature_store import FeatureSpec
    from services.target.rounds.round_factory import MappedRounds
    from services.target.rounds.round_shapes import RoundSource
    from services.target.sequence import Sequence
    from services.target.verifier import VerificationMode
    from services.target.weight_control import WeightVersion
    from shared.errors import OutriderError
    from shared.runtime.mapped_rounds import MappedCommand
    from shared.runtime.ring_memory import FeatureRingWriter


@dataclass(frozen=True, slots=True)
class AttachmentTerms:
    """The terms that the target grants to every draft.

    Attributes:
        max_nodes: largest tree accepted, in nodes.
        max_sequences: most sequences assigned to one draft.
        longest_wait_s: upper bound of the wait for candidates.
        feature_ring_rows: rows of the memory shared with a draft on this host; 0 shares none.
    """

    mode: VerificationMode
    max_nodes: int
    max_sequences: int
    longest_wait_s: float
    feature_ring_rows: int = 0


# The time that the target waits for the trees of one draft.
#
# The timeout is a few times the usual response time of the draft. After three misses in a row the
# draft counts as silent: the target waits for it only in probes, within a small share of the time.
# A probe is longer if candidates of the draft have arrived since the last one. So a frozen process
# costs almost nothing, and a draft that recovers or has become slow is found again.

MAX_WARM_UP_S = 5.0
"""A warm-up counts for this long at most. Compiling kernels for the first time takes seconds."""


@dataclass(slots=True)
class DraftWarmUp:
    """The warm-up of one attachment.

    Its trees are late during a warm-up, so the target neither waits for them nor measures them.
    """

    _since_s: float | None = None
    _until_s: float = -math.inf

    def report(self, now_s: float, *, is_warming: bool) -> None:
        """Takes what a draft reports about its warm-up."""
        since_s = self._since_s
        self._since_s = (now_s if since_s is None else since_s) if is_warming else None
        if not is_warming and since_s is not None:
            self._until_s = min(now_s, since_s + MAX_WARM_UP_S)

    def is_on(self, now_s: float) -> bool:
        """Whether a warm-up is under way."""
        return self._since_s is not None and now_s < self._since_s + MAX_WARM_UP_S

    def was_on(self, since_s: float, now_s: float) -> bool:
        """Whether a warm-up was under way at any time from `since_s` until now."""
        last_s = -math.inf if self._since_s is None else min(self._since_s + MAX_WARM_UP_S, now_s)
        return self.is_on(now_s) or max(last_s, self._until_s) > since_s


MISSES_UNTIL_COLD = 3
WAIT_PER_RESPONSE = 4.0
SMOOTHING = 0.2
SHORTEST_WAIT_S = 0.02
ACTIVE_PROBE_FACTOR = 4.0
"""A probe is this many times longer if candidates have arrived since the last one."""
PROBE_SHARE, SHORTEST_GAP_S, LONGEST_GAP_S = 0.02, 0.25, 4.0
"""Share of the time that probes may take, and bounds of the time from one probe to the next."""


@dataclass(slots=True)
class DraftTimeout:
    """The timeout of one attachment.

    Attributes:
        longest_wait_s: upper bound of a wait; 0 never waits.
        response_s: usual time to answer a verdict; None before the first answer.
    """

    longest_wait_s: float
    response_s: float | None = None
    _num_misses: int = 0
    _last_miss_s: float | None = None
    _is_active: bool = False
    _probe_s: float = 0.0

    @property
    def is_cold(self) -> bool:
        """Whether the draft is silent."""
        return self._num_misses >= MISSES_UNTIL_COLD

    def awaits_probe(self, now_s: float) -> bool:
        """Whether the draft is silent and its next probe is not due."""
        return self.is_cold and now_s < self._probe_s

    @property
    def wait_s(self) -> float:
        """The timeout of a draft that is not silent."""
        if self.response_s is None:
            return self.longest_wait_s
        wait_s = max(WAIT_PER_RESPONSE * self.response_s, SHORTEST_WAIT_S)
        return min(wait_s, self.longest_wait_s)

    def deadline_s(self, now_s: float, worthwhile_s: float = math.inf) -> float:
        """Returns until when a sequence waits for its next tree. Called at its verdict.

        Args:
            worthwhile_s: the longest wait that can pay.
        """
        most_s = min(worthwhile_s, self.longest_wait_s)
        if not self.is_cold:
            return now_s + min(self.wait_s, most_s)
        if now_s < self._probe_s:
            return now_s
        is_active, self._is_active = self._is_active, False
        wait_s = min(ACTIVE_PROBE_FACTOR * self.wait_s if is_active else self.wait_s, most_s)
        self._probe_s = now_s + min(max(wait_s / PROBE_SHARE, SHORTEST_GAP_S), LONGEST_GAP_S)
        return now_s + wait_s

    def candidates_arrived(self) -> None:
        """Notes that candidates arrived, for any round."""
        self._is_active = True

    def responded(self, response_s: float | None) -> None:
        """Notes that a candidate for a current round arrived.

        Args:
            response_s: time since its verdict; None when the draft did more than respond to a
                verdict, such as reading a prompt.
        """
        if response_s is not None:
            mean_s = self.response_s
            self.response_s = (
                response_s if mean_s is None else mean_s + SMOOTHING * (response_s - mean_s)
            )
        self._num_misses = 0

    def in_time(self) -> None:
        """Notes that the tree of a new round was pushed ahead, so that the round need not wait."""
        self._num_misses = 0

    def missed(self, now_s: float) -> None:
        """Notes that a round ended without its candidate. Rounds of one step count once."""
        if now_s != self._last_miss_s:
            self._num_misses += 1
            self._last_miss_s = now_s


SHORTEST_RESPONSE_S = 0.001
"""Drafts that respond sooner count as equally fast."""

DEFAULT_SHAPE = TreeShape(3, 1, 4)
"""Assumed tree shape of a draft that did not report one."""


@dataclass(frozen=True, slots=True, eq=False)
class FeatureRows:
    """Features of consecutive committed positions of one sequence.

    Attributes:
        position_offset: position of the first row.
        rows: `[R, W]`, in the dtype the draft asked for, on any device.
        num_prompt_tokens: length of the sequence's prompt.
        ring_start: number of the first row in the draft's ring; None if the rows are not in it.
    """

    sequence_id: int
    position_offset: int
    rows: Tensor
    num_prompt_tokens: int
    ring_start: int | None = None

    @property
    def num_rows(self) -> int:
        """R."""
        return self.rows.shape[0]  # several times as fast as `len`

    def split(self, num_last: int) -> tuple[FeatureRows, FeatureRows]:
        """Returns the rows before the last `num_last`, and the last `num_last`."""
        num_before = max(self.num_rows - num_last, 0)
        return (
            replace(self, rows=self.rows[:num_before]),
            replace(
                self,
                position_offset=self.position_offset + num_before,
                rows=self.rows[num_before:],
                ring_start=None if self.ring_start is None else self.ring_start + num_before,
            ),
        )

    @property
    def end(self) -> int:
        """The position after the last row."""
        return self.position_offset + self.num_rows


@dataclass(slots=True)
class DraftMessage:
    """The message to one draft after one step. At most one a step, for any batch size. It is filled
    during the step, and not changed once it is sent.

    Attributes:
        features: rows of newly computed positions, without gaps from a sequence's first row on.
            A sequence's rows come no later than the verdict that commits the tokens behind them.
        weights: the target's current weight version, if the draft has not been told of it. Sent
            after the closed sequences.
        commands: commands to a head in mapped rounds.
    """

    opened: list[OpenedSequence] = field(default_factory=list)
    verdicts: list[Verdict] = field(default_factory=list)
    closed: list[int] = field(default_factory=list)
    features: list[FeatureRows] = field(default_factory=list)
    weights: WeightVersion | None = None
    commands: list[MappedCommand] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class MappedOffer:
    """A draft's head that can take part in rounds through mapped memory.

    Attributes:
        vocab_size: tokens that it can propose.
        max_context_tokens: longest sequence that a round may start from.
        is_pinned: an operator fixed the shape of its trees.
        num_outcomes: possible verdicts of a sequence for which it can prepare chains; 0 for none.
    """

    vocab_size: int
    max_context_tokens: int
    is_pinned: bool
    num_outcomes: int = 0


@dataclass(frozen=True, slots=True)
class Offer:
    """Candidates that one draft pushed, with its report on itself.

    Attributes:
        arrived_s: arrival time by the engine's clock, perhaps during a step.
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
        shape: shape of its trees unless another one is requested; None if it did not report one.
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
    """A draft with the trees that the target requests of it.

    Attributes:
        shape: tree shape requested for most of its sequences, or for a first one if it has none;
            None while no tree is wanted.
        num_paused: its sequences for which no trees are requested.
        level_rates: acceptance by level.
        num_outcomes: most possible verdicts for which it is asked to prepare trees; None where the
            draft decides.
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
        report: its last report on itself.
        is_in_process: it reads hidden states on the target's device, behind the target's work.
        ring: shared memory through which it reads hidden states; None if messages carry them.
        outcomes: counts of the verdicts for which it had prepared a tree, over its life.
        base_shape: shape of its trees unless another one is requested.
        kind: algorithm, model and shape. Drafts of one kind propose alike.
        policy: decides the trees requested of drafts of its kind; set when the draft is added.
        warm_up: whether it captures CUDA graphs or compiles kernels now.
        rounds: its head and pages, for rounds on the device; None where it drafts by itself.
        mapped_offer: its head could take part in rounds from its own process.
        mapped: these rounds, from the time at which the target begins to open them.
        end_waits: ends the waits of these rounds for its trees; see `MappedHead.open`.
        refusal: why it was not added; set before its port is closed.
        learns: it is a learner: it gets sequences that have ended, and drafts for none.
        max_context_tokens: most tokens of an ended sequence that a learner wants; None for all.
        outbox: the message that is being filled.
    """

    identity: DraftIdentity
    port: DraftPort
    timeout: DraftTimeout
    feature_spec: FeatureSpec | None = None
    is_in_process: bool = False
    ring: FeatureRingWriter | None = None
    rounds: RoundSource | None = None
    mapped_offer: MappedOffer | None = None
    mapped: MappedRounds | None = None
    end_waits: Callable[[], None] | None = None
    refusal: OutriderError | None = None
    learns: bool = False
    max_context_tokens: int | None = None
    report: DraftReport = NO_REPORT
    counters: AttachmentCounters = field(default_factory=AttachmentCounters)
    outcomes: OutcomeTally = field(default_factory=OutcomeTally)
    base_shape: TreeShape = field(init=False)
    kind: tuple[str, str, TreeShape] = field(init=False)
    policy: DraftPolicy = field(init=False)
    warm_up: DraftWarmUp = field(default_factory=DraftWarmUp)
    sequence_ids: set[int] = field(default_factory=set)
    released: set[int] = field(default_factory=set)
    outbox: DraftMessage = field(default_factory=DraftMessage)

    def __post_init__(self) -> None:
        self.base_shape = self.identity.shape or DEFAULT_SHAPE
        self.kind = self.identity.algorithm, self.identity.model_id, self.base_shape
        self.policy = DraftPolicy(self.base_shape, always_up_to=ALWAYS)

    @property
    def reads_features(self) -> bool:
        return self.feature_spec is not None

    def placed(self, rows: Tensor) -> tuple[Tensor, int | None]:
        """Puts hidden states `[R, W]` where the draft can read them: on the device, in its ring,
        or, without a ring or while that is full, on the host for a message. Called on the engine
        thread.

        Returns:
            The rows, and the number of the first one in the ring; None if they are not in it.
        """
        if self.is_in_process:
            return rows, None
        start = None if self.ring is None else self.ring.write(rows)
        return (rows.cpu() if start is None else rows), start

    @property
    def load(self) -> tuple[float, int]:
        """Sort key of drafts: how long one more sequence would wait for its trees."""
        size = len(self.sequence_ids) + 1
        return size * max(self.timeout.response_s or 0.0, SHORTEST_RESPONSE_S), size

    def abandon(self) -> None:
        """Ends the wait of rounds on the device for its trees, once its stream has ended. From any
        thread."""
        if self.end_waits is not None:
            self.end_waits()

    def is_avoided(self, now_s: float) -> bool:
        """Whether other drafts come first for a sequence: this one is silent, and either has a
        sequence to probe it with already, or its next probe is not due."""
        timeout = self.timeout
        return timeout.is_cold and (bool(self.sequence_ids) or timeout.awaits_probe(now_s))

    def takes(self, sequence: Sequence) -> bool:
        """Whether a sequence may be assigned to it: it has room, has not released the sequence, and
        is of the requested algorithm."""
        return (
            len(self.sequence_ids) < self.identity.max_sequences
            and sequence.sequence_id not in self.released
            and sequence.request.draft_algorithm in (None, self.identity.algorithm)
        )

    def close(self, sequence_id: int) -> None:
        """Takes a sequence that has ended or moves from the draft.

        In a message, closed sequences come before opened ones. So if the draft has not been told of
        the sequence yet, everything about it leaves the outbox instead.
        """
        outbox = self.outbox
        opened = [s for s in outbox.opened if s.sequence_id != sequence_id]
        if len(opened) == len(outbox.opened):
            outbox.closed.append(sequence_id)
            return
        outbox.opened = opened
        outbox.verdicts = [v for v in outbox.verdicts if v.sequence_id != sequence_id]
        outbox.features = [f for f in outbox.features if f.sequence_id != sequence_id]

    def take_message(self) -> DraftMessage | None:
        """Empties the outbox; returns None when there is nothing in it."""
        message, empty = self.outbox, DraftMessage()
        if message == empty:
            return None
        self.outbox = empty
        return message


class DraftStream:
    """The queue of messages to one draft: a `DraftPort` whose messages the draft's RPC takes.

    The queue is bounded. A draft that lets it fill up does not keep up and is detached, because a
    dropped message would leave it with a wrong view of its sequences. It needs no lock: only the
    engine thread adds messages, and only the event loop takes them.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, capacity: int) -> None:
        self._loop = loop
        self._capacity = capacity
        self._messages: deque[DraftMessage] = deque()
        self._graces_s: deque[float] = deque()
        self._is_closed = False
        self._has_news = asyncio.Event()

    def send(self, message: DraftMessage) -> bool:
        """Queues a message; False when the queue is full. Called on the engine thread."""
        if len(self._messages) >= self._capacity:
            return False
        self._messages.append(message)
        self._notify()
        return True

    def close(self) -> None:
        """Ends the stream after what is queued. Called on the engine thread."""
        self._is_closed = True
        self._notify()

    def drain(self, grace_s: float) -> None:
        """Asks the draft to detach within the grace period, ahead of the queued messages. Called
        on the event loop, like all methods below."""
        self._graces_s.append(grace_s)
        self.wake()

    def wake(self) -> None:
        """Ends the wait in `news`."""
        self._has_news.set()

    async def news(self) -> None:
        """Waits until there is something to take, the stream is over, or `wake` was called. For one
        reader, which takes everything before it waits again."""
        # The event is set after each addition, so none is missed. An event that is left set costs
        # one check that finds nothing.
        if not (self._messages or self._is_closed):
            await self._has_news.wait()
            self._has_news.clear()

    def take(self) -> DraftMessage | None:
        """Returns the next message; None when there is none."""
        return self._messages.popleft() if self._messages else None

    def take_grace_s(self) -> float | None:
        """Returns the grace of the next `drain`; None when there is none."""
        return self._graces_s.popleft() if self._graces_s else None

    @property
    def is_over(self) -> bool:
        """Whether the stream was closed and nothing is left to take."""
        # In this order: nothing is queued after the stream is closed.
        return self._is_closed and not self._messages

    def _notify(self) -> None:
        try:
            self._loop.call_soon_threadsafe(self._has_news.set)
        except RuntimeError:
            # The loop closed under a stopping server; nobody reads any more.
            if not self._loop.is_closed():
                raise


class DraftRegistry:
    """Attached drafts by their attachment id. Owned by the engine thread.

    Args:
        config: trees to choose from; None leaves each draft its own shape.
        always_up_to: number of sequences up to which trees are always requested, even where
            plain steps are faster.

    Attributes:
        algorithms: algorithms of the live drafts, sorted, without duplicates. The tuple is
            replaced, never changed, so that other threads may read it.
        known_algorithms: algorithms of all drafts that ever attached.
        costs: times of plain steps measured at start-up; empty before.
    """

    def __init__(self, config: AdaptiveConfig | None = None, *, always_up_to: int = ALWAYS) -> None:
        self._config = config
        self._always_up_to = always_up_to
        self.algorithms: tuple[str, ...] = ()
        self.known_algorithms: set[str] = set()
        self.costs = CostTable()
        self._attachments: dict[str, Attachment] = {}

    @property
    def live(self) -> tuple[Attachment, ...]:
        """Attachments, oldest first."""
        return tuple(self._attachments.values())

    @property
    def policies(self) -> tuple[DraftPolicy, ...]:
        """The policies of the attached drafts, one for each kind."""
        return tuple({draft.kind: draft.policy for draft in self._attachments.values()}.values())

    def candidate_shapes(self, base: TreeShape) -> tuple[TreeShape, ...]:
        """Returns the tree shapes that may be requested of a draft, beside its own. From any
        thread."""
        return () if self._config is None else self._config.shapes(base)

    def get(self, attachment_id: str) -> Attachment | None:
        """Returns a draft; None when it has left."""
        return self._attachments.get(attachment_id)

    def add(self, attachment: Attachment) -> None:
        """Adds a draft that attached. Drafts of one kind share a policy."""
        same = next((draft for draft in self.live if draft.kind == attachment.kind), None)
        if same is None:
            attachment.policy = self._new_policy(attachment)
        else:
            attachment.policy = same.policy
            attachment.policy.drafts_changed()
        self._attachments[attachment.identity.attachment_id] = attachment
        self.known_algorithms.add(attachment.identity.algorithm)
        self._publish_algorithms()

    def remove(self, attachment_id: str) -> Attachment | None:
        """Removes a draft and returns it; None when it had left before."""
        attachment = self._attachments.pop(attachment_id, None)
        self._publish_algorithms()
        return attachment

    def renew_policies(self) -> None:
        """Forgets what policies have measured."""
        renewed: dict[object, DraftPolicy] = {}
        for draft in self.live:
            if draft.kind not in renewed:
                renewed[draft.kind] = self._new_policy(draft)
                renewed[draft.kind].is_pinned = draft.policy.is_pinned
            draft.policy = renewed[draft.kind]

    def _new_policy(self, draft: Attachment) -> DraftPolicy:
        return DraftPolicy(
            draft.base_shape, self._config, always_up_to=self._always_up_to, costs=self.costs
        )

    def check_algorithm(self, algorithm: str | None) -> None:
        """Checks the algorithm that a request names. A draft that left may come back, so its
        algorithm remains valid.

        Raises:
            InvalidArgument: no draft of the algorithm ever attached.
        """
        if algorithm is None or algorithm in self.known_algorithms:
            return
        known = ", ".join(sorted(self.known_algorithms)) or "no draft at all"
        message = f"no draft of algorithm {algorithm!r} ever attached; there was {known}"
        raise InvalidArgument.of("ALGORITHM_UNKNOWN", "speculation.algorithm", message)

    def take_messages(self) -> list[tuple[Attachment, DraftMessage]]:
        """Empties every outbox, and returns one message for each draft that has any."""
        taken = [(draft, draft.take_message()) for draft in self._attachments.values()]
        return [(draft, message) for draft, message in taken if message is not None]

    def _publish_algorithms(self) -> None:
        algorithms = {draft.identity.algorithm for draft in self._attachments.values()}
        self.algorithms = tuple(sorted(algorithms))
