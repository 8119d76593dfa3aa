"""The terms that a target grants to the drafts that attach."""

from __future__ import annotations

from dataclasses import dataclass

from services.target.verifier import VerificationMode


@dataclass(frozen=True, slots=True)
class AttachmentTerms:
    """The terms for every draft.

    Attributes:
        max_nodes: largest tree accepted, in nodes.
        max_sequences: most sequences assigned to one draft.
        longest_wait_s: upper bound of the wait for candidates.
        max_queued_messages: a draft that lets more messages pile up is detached.
        feature_ring_rows: rows of memory shared with a draft of this host; 0 shares none.
    """

    mode: VerificationMode
    max_nodes: int
    max_sequences: int
    longest_wait_s: float
    max_queued_messages: int = 256
    feature_ring_rows: int = 0
