"""Loads the draft model and its KV pool."""

from __future__ import annotations

import logging

import torch

from services.draft.drafters.standalone import CONTEXT_MARGIN, StandaloneDrafter
from services.draft.settings import DraftSettings, Dtype
from shared.errors import CheckpointError
from shared.kv.leases import KvLeases
from shared.kv.pool import KvPool
from shared.models.config import ModelConfig
from shared.models.loader import load_decoder
from shared.runtime.memory import num_pages_for
from shared.runtime.runner import ModelRunner

log = logging.getLogger(__name__)


def build_standalone(settings: DraftSettings) -> StandaloneDrafter:
    """Returns the drafter with weights loaded.

    Raises:
        CheckpointError: the folder cannot be served.
        SettingsError: memory does not hold what the settings ask for.
    """
    torch.set_num_threads(settings.num_threads)
    folder = settings.model_folder
    device = _device(settings.device)
    config = ModelConfig.from_folder(folder)
    dtype = _dtype(settings.dtype, config, device)
    max_context = _max_context(settings, config)
    decoder = load_decoder(folder, dtype=dtype, device=device, show_progress=True)
    layout = decoder.kv_layout(settings.page_size, dtype)
    num_pages = num_pages_for(
        layout,
        device,
        mem_fraction_static=settings.mem_fraction_static,
        max_total_tokens=settings.max_total_tokens,
        max_sequence_length=min(max_context, settings.max_total_tokens or max_context),
    )
    leases = KvLeases(num_pages, settings.page_size, prefix_cache=not settings.disable_radix_cache)
    log.info("%s in %s on %s; %s KV pages", folder.name, dtype, device, f"{leases.num_pages:,}")
    runner = ModelRunner(decoder, KvPool(layout, num_pages, device))
    return StandaloneDrafter(runner, leases, max_context_tokens=max_context)


def _max_context(settings: DraftSettings, config: ModelConfig) -> int:
    longest = config.max_position_embeddings
    context = min(settings.context_length or longest, longest, settings.max_total_tokens or longest)
    if context < 2 * CONTEXT_MARGIN:
        raise CheckpointError(
            f"the draft's context is {context} tokens; trees need {CONTEXT_MARGIN} of it, so at "
            f"least {2 * CONTEXT_MARGIN} are wanted"
        )
    return context


def _device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return torch.device(name)


def _dtype(dtype: Dtype, config: ModelConfig, device: torch.device) -> torch.dtype:
    if dtype is not Dtype.AUTO:
        named: torch.dtype = getattr(torch, dtype.value)
        return named
    return torch.float32 if device.type == "cpu" else config.dtype or torch.bfloat16
