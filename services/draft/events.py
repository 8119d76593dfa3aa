"""Events and outputs of the draft engine, worker identity and link status. No protobuf."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from shared.candidate_columns import CandidateColumns
from shared.tokens import (
    NO_REPORT,
    DraftReport,
    OpenedSequence,
    TokenTree,
    TreeShape,
    Verdict,
)

if TYPE_CHECKING:
    # A worker without a model runs where torch is not installed.
    from torch import Tensor

    from shared.models.heads.feature_spec import FeatureSpec
    from shared.runtime.mapped_rounds import MappedCommand


@dataclass(frozen=True, slots=True)
class LinkTerms:
    """The target's terms at attachment.

    Attributes:
        vocab_size: trees may hold only tokens below this id.
        max_nodes: most nodes of a tree.
        max_sequences: most sequences held on this link; further ones are released at once.
        mirrors_noise: the target draws with noise keyed by (seed, position, token).
        max_conditional: most candidates kept for the verdicts of one sequence's round.
        draws_chains: the target is in this process, and verifies chains by the distributions that
            their tokens were drawn from.
        shapes: tree shapes that the target may request, besides the draft's own.
    """

    vocab_size: int
    max_nodes: int
    max_sequences: int
    mirrors_noise: bool
    max_conditional: int = 0
    draws_chains: bool = False
    shapes: tuple[TreeShape, ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class FeatureRows:
    """Features of the target at consecutive positions, as the drafter's spec asked for them.

    Attributes:
        position_offset: position of the first row.
        rows: `[R, W]`, in host memory when they came over the wire, else on the device where the
            target computed them; never written.
    """

    position_offset: int
    rows: Tensor


@dataclass(frozen=True, slots=True)
class LinkOpened:
    """A target accepted the attachment."""

    link: int
    terms: LinkTerms


@dataclass(frozen=True, slots=True)
class LinkClosed:
    """The stream to a target ended; its sequences end with it."""

    link: int


@dataclass(frozen=True, slots=True)
class Probe(OpenedSequence):
    """A sequence that is opened for one tree; see `DraftSequence`.

    Attributes:
        shape: overrides the live tree shape.
        features: features of every position but the last, for drafters that read them.
    """

    shape: TreeShape | None = None
    features: FeatureRows | None = None


@dataclass(frozen=True, slots=True)
class SequencesOpened:
    """Sequences assigned in one step of a target."""

    link: int
    openings: tuple[OpenedSequence, ...]


@dataclass(frozen=True, slots=True)
class RoundResult:
    """A verdict, with the features of the newly computed positions if the drafter reads them."""

    verdict: Verdict
    features: FeatureRows | None = None


@dataclass(frozen=True, slots=True)
class RoundsDecided:
    """Verdicts of one step of a target."""

    link: int
    results: tuple[RoundResult, ...]


@dataclass(frozen=True, slots=True)
class FeaturesArrived:
    """Feature rows of prompt positions."""

    link: int
    sequence_id: int
    rows: FeatureRows


@dataclass(frozen=True, slots=True)
class WeightsUpdated:
    """A target has new weights: rows computed from its earlier features are out of date.

    Attributes:
        num_updates: weight updates since the target started.
    """

    link: int
    num_updates: int


@dataclass(frozen=True, slots=True)
class MappedCommandArrived:
    """A command of a target to the draft's head in mapped rounds."""

    link: int
    command: MappedCommand


@dataclass(frozen=True, slots=True)
class SequencesClosed:
    """Sequences that ended."""

    link: int
    sequence_ids: tuple[int, ...]


SequenceEvent = (
    LinkOpened
    | LinkClosed
    | SequencesOpened
    | RoundsDecided
    | FeaturesArrived
    | SequencesClosed
    | WeightsUpdated
)
Event = SequenceEvent | MappedCommandArrived


@dataclass(frozen=True, slots=True)
class CandidatesReady:
    """Candidates of one step for one link."""

    link: int
    candidates: CandidateColumns
    report: DraftReport = field(default=NO_REPORT, compare=False)


@dataclass(frozen=True, slots=True)
class SequencesReleased:
    """Sequences the draft no longer holds."""

    link: int
    sequence_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class MappedHeadReady:
    """The head is ready for mapped rounds.

    Attributes:
        pages: pages of the head's KV cache for these rounds; empty where it takes no part in them.
    """

    link: int
    pages: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ProbeDone:
    """Answer to a probe.

    Attributes:
        tree: None when the draft had no KV memory for the prompt.
        draft_s: time in the drafter without queueing, in seconds.
    """

    link: int
    tree: TokenTree | None
    draft_s: float


Output = CandidatesReady | SequencesReleased | MappedHeadReady | ProbeDone


MAX_TREE_NODES = 256
"""Nodes of the largest shape that may be set live, the root left out."""


@dataclass(frozen=True, slots=True)
class MappedHeadLimits:
    """Sizes of a head that can take part in rounds of a target through mapped memory.

    Attributes:
        page_size: tokens in a page of the head's KV cache.
        vocab_size: number of tokens that the head can propose.
        max_context_tokens: longest sequence that a round may start from.
        num_outcomes: most verdicts of a sequence that the head can prepare chains for; 0 for none.
    """

    page_size: int
    vocab_size: int
    max_context_tokens: int
    num_outcomes: int = 0


@dataclass(frozen=True, slots=True)
class WorkerIdentity:
    """Identity of the worker, sent to every target.

    Attributes:
        worker_id: stable as long as the process lives.
        tokenizer_sha256: None for drafters that fit any tokenizer.
        max_context_tokens: None is unbounded.
        feature_spec: hidden states the drafter reads; None for token-level drafters.
        shape: shape of the draft's trees while a target requests no other; None is unknown.
        host_id: the host of a worker that can share memory with a target on it; empty for a worker
            that takes features as bytes.
        device: the drafter's device, as torch names it. Only a GPU reads the memory of another GPU.
        device_id: identifies a GPU among those of its host; empty for a CPU.
        mapped_head: see `MappedHeadLimits`; None where the drafter shares no head.
        is_shape_pinned: whether an operator fixed the shape.
        learns: the worker trains on sequences that have ended, and drafts for none.
    """

    worker_id: str
    model_id: str
    algorithm: str
    tokenizer_sha256: str | None
    max_sequences: int
    max_context_tokens: int | None
    feature_spec: FeatureSpec | None = None
    shape: TreeShape | None = None
    host_id: str = ""
    device: str = "cpu"
    device_id: str = ""
    mapped_head: MappedHeadLimits | None = None
    is_shape_pinned: bool = False
    learns: bool = False

    @property
    def reads_cuda(self) -> bool:
        """Whether the shared memory may be a GPU's."""
        return self.device.startswith("cuda")


@dataclass(frozen=True, slots=True)
class LinkStatus:
    """State of the link to one target.

    Attributes:
        attachment_id: None when not attached.
        last_error: why the last stream ended; None when attached or never tried.
        is_refused: the target refused this draft permanently: dialing again will not help.
    """

    address: str
    attachment_id: str | None = None
    last_error: str | None = None
    is_refused: bool = False
