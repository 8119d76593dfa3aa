"""Where a drafter's weights and KV go: device, dtype, context and pages, from the settings."""

from __future__ import annotations

import logging

import torch

from services.draft.settings import DraftSettings, Dtype
from shared.errors import CheckpointError
from shared.kv.layout import KvLayout
from shared.kv.leases import KvLeases
from shared.kv.pool import KvPool
from shared.runtime.memory import num_pages_for

log = logging.getLogger(__name__)


def device_for(settings: DraftSettings) -> torch.device:
    """Returns the device; `auto` prefers CUDA."""
    if settings.device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return torch.device(settings.device)


def dtype_for(
    settings: DraftSettings, saved: torch.dtype | None, device: torch.device
) -> torch.dtype:
    """Returns the dtype of weights and KV; `auto` takes what a GPU's checkpoint was saved in."""
    if settings.dtype is not Dtype.AUTO:
        named: torch.dtype = getattr(torch, settings.dtype.value)
        return named
    return torch.float32 if device.type == "cpu" else saved or torch.bfloat16


def context_for(settings: DraftSettings, longest: int, *, margin_tokens: int) -> int:
    """Returns the tokens a forward can look back on.

    Args:
        longest: what the checkpoint was trained on.
        margin_tokens: what a tree takes of it.

    Raises:
        CheckpointError: no room is left for a context beside a tree.
    """
    context = min(settings.context_length or longest, longest, settings.max_total_tokens or longest)
    if context < 2 * margin_tokens:
        raise CheckpointError(
            f"the draft's context is {context} tokens; trees need {margin_tokens} of it, so at "
            f"least {2 * margin_tokens} are wanted"
        )
    return context


def allocate_kv(
    settings: DraftSettings, layout: KvLayout, device: torch.device, *, max_context_tokens: int
) -> tuple[KvPool, KvLeases]:
    """Allocates the KV pool; call it once the weights are loaded.

    Raises:
        SettingsError: memory does not hold what the settings ask for.
    """
    num_pages = num_pages_for(
        layout,
        device,
        mem_fraction_static=settings.mem_fraction_static,
        max_total_tokens=settings.max_total_tokens,
        max_sequence_length=min(
            max_context_tokens, settings.max_total_tokens or max_context_tokens
        ),
    )
    leases = KvLeases(num_pages, settings.page_size, prefix_cache=not settings.disable_radix_cache)
    log.info("%s KV pages of %d tokens", f"{leases.num_pages:,}", settings.page_size)
    return KvPool(layout, num_pages, device), leases
