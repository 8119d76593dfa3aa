"""Builds the tree grower, which grows a whole tree in one pass, and counts its memory."""

from __future__ import annotations

import torch

from services.draft.settings import DraftSettings
from shared.kv.pool import KvPool
from shared.model_options import AttentionBackend
from shared.models.config import ModelConfig
from shared.models.heads.head import DraftHead
from shared.runtime.graph_inputs import GraphLimits
from shared.runtime.graphs import graph_memory_bytes
from shared.runtime.tree_grower import TreeGrower
from shared.runtime.tree_model import HeadModel
from shared.runtime.tree_pass import PassLimits, head_memory_bytes, num_pass_rows


def pass_limits(
    settings: DraftSettings, device: torch.device, *, max_context_tokens: int
) -> PassLimits:
    """Returns the sizes of passes."""
    # The plain kernels ask the device for sizes, which no graph can hold.
    has_kernels = settings.speculative_draft_attention_backend is not AttentionBackend.TORCH
    return PassLimits(
        max_sequences=settings.max_running_requests,
        max_context_tokens=max_context_tokens,
        has_graphs=device.type == "cuda"
        and has_kernels
        and settings.enable_cuda_graph is not False,
    )


def reserved_for_head(settings: DraftSettings, head: DraftHead, limits: PassLimits) -> int:
    """Returns the bytes that the cache has to leave for the passes of a head."""
    if not limits.has_graphs:
        return 0
    return _num_memories(settings) * head_memory_bytes(head, settings.shape, limits)


def reserved_for_model(
    settings: DraftSettings, config: ModelConfig, dtype: torch.dtype, limits: PassLimits
) -> int:
    """Returns the bytes that the cache has to leave for the passes of a language model."""
    if not limits.has_graphs:
        return 0
    largest = GraphLimits(
        max_rows=num_pass_rows(settings.shape, limits),
        max_sequences=limits.max_sequences,
        max_tail_width=settings.shape.num_steps * settings.shape.topk,
        max_context_tokens=limits.max_context_tokens,
    )
    return _num_memories(settings) * graph_memory_bytes(config, largest, dtype)


def _num_memories(settings: DraftSettings) -> int:
    """Passes for verdicts to come have memory of their own."""
    return 2 if settings.speculative_outcome_budget else 1


def head_grower(head: DraftHead, pool: KvPool, limits: PassLimits) -> TreeGrower:
    """Returns what grows the trees of a head of one layer."""
    return TreeGrower(HeadModel(head, pool), limits)
