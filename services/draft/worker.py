"""The reports of a draft worker about itself and its links."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from shared.tokens import TreeShape

if TYPE_CHECKING:
    # A worker without a model runs where torch is not installed.
    from shared.models.heads.feature_spec import FeatureSpec

MAX_TREE_NODES = 256
"""Nodes of the largest shape that may be set live, the root left out."""


@dataclass(frozen=True, slots=True)
class MappedHeadLimits:
    """Sizes of a head that can take part in rounds of a target through mapped memory.

    Attributes:
        page_size: tokens in a page of its KV cache.
        vocab_size: tokens that it can propose.
        max_context_tokens: longest sequence that a round may start from.
        num_outcomes: verdicts of a sequence that it can prepare chains for; 0 for none.
    """

    page_size: int
    vocab_size: int
    max_context_tokens: int
    num_outcomes: int = 0


@dataclass(frozen=True, slots=True)
class WorkerIdentity:
    """Sent to every target.

    Attributes:
        worker_id: stable as long as the process lives.
        tokenizer_sha256: None for drafters that fit any tokenizer.
        max_context_tokens: None is unbounded.
        feature_spec: hidden states the drafter reads; None for token-level drafters.
        shape: of its trees while a target wants no other; None does not say.
        host_id: of a worker that can share memory with a target of its host; empty takes features
            as bytes.
        device: of the drafter, as torch names it. Only a GPU reads the memory of another.
        device_id: tells a GPU from the others of its host; empty for a CPU.
        mapped_head: see `MappedHeadLimits`; None where the drafter lends no head.
        is_shape_pinned: an operator fixed the shape.
        learns: it is shown sequences that have ended, and drafts for none.
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
        """Whether that memory may be a GPU's."""
        return self.device.startswith("cuda")


@dataclass(frozen=True, slots=True)
class LinkStatus:
    """State of the link to one target.

    Attributes:
        attachment_id: None when not attached.
        last_error: why the last stream ended; None when attached or never tried.
        is_refused: the target refused this draft for good: the same again will not help.
    """

    address: str
    attachment_id: str | None = None
    last_error: str | None = None
    is_refused: bool = False
