"""Finds requests that rounds on the device can serve without the host. No torch."""

from __future__ import annotations

from services.target.adaptive_config import MAX_DRAFT_TOKENS
from services.target.requests.request import GenerationRequest


def can_be_round(
    request: GenerationRequest, algorithm: str, num_tree_rows: int = MAX_DRAFT_TOKENS
) -> bool:
    """Whether a draft of this algorithm can draft for the request in rounds, at any depth.

    They know no grammars and compute no trace, and verify whole trees of one shape.

    Args:
        num_tree_rows: that their trees have at most, the root included.
    """
    return (
        request.grammar is None
        and not request.speculation_disabled
        and not request.wants_trace
        and not request.wants_routes
        and not request.scores_shaped
        and not request.logprob_token_ids
        and request.draft_algorithm in (None, algorithm)
        and request.num_draft_steps is None
        and (request.num_draft_tokens or MAX_DRAFT_TOKENS) >= num_tree_rows
    )
