"""What grows the trees of a head in one pass, and the memory it takes."""

from __future__ import annotations

from services.draft.settings import DraftSettings
from shared.kv.pool import KvPool
from shared.model_options import AttentionBackend
from shared.models.heads.head import DraftHead
from shared.runtime.tree_grower import TreeGrower
from shared.runtime.tree_memory import tree_memory_bytes
from shared.runtime.tree_pass import PassLimits


def pass_limits(
    settings: DraftSettings, head: DraftHead, *, max_context_tokens: int
) -> PassLimits | None:
    """Returns the sizes of a head's passes; None where its trees grow level by level: heads of
    several layers take turns level by level, and only single forwards are compiled."""
    if len(head.layers) > 1 or settings.enable_torch_compile:
        return None
    is_wanted = settings.enable_cuda_graph in (None, True)
    # The plain kernels ask the device for sizes, which no graph can hold.
    has_kernels = settings.speculative_draft_attention_backend is not AttentionBackend.TORCH
    return PassLimits(
        max_sequences=settings.max_running_requests,
        max_context_tokens=max_context_tokens,
        has_graphs=head.device.type == "cuda" and is_wanted and has_kernels,
    )


def reserved_bytes(settings: DraftSettings, head: DraftHead, limits: PassLimits | None) -> int:
    """Returns the memory that the cache has to leave for passes."""
    return 0 if limits is None else tree_memory_bytes(head, settings.shape, limits)


def grower_for(head: DraftHead, pool: KvPool, limits: PassLimits | None) -> TreeGrower | None:
    """Returns what grows the trees of a head; None where that is level by level."""
    return None if limits is None else TreeGrower(head, pool, limits)
