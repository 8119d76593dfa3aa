"""Loads the draft model and its KV pool."""

from __future__ import annotations

import logging

import torch

from services.draft.drafters.placement import allocate_kv, context_for, device_for, dtype_for
from services.draft.drafters.standalone import CONTEXT_MARGIN, StandaloneDrafter
from services.draft.settings import DraftSettings
from shared.models.config import ModelConfig
from shared.models.loader import load_decoder
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
    device = device_for(settings)
    config = ModelConfig.from_folder(folder)
    dtype = dtype_for(settings, config.dtype, device)
    context = context_for(settings, config.max_position_embeddings, margin_tokens=CONTEXT_MARGIN)
    decoder = load_decoder(folder, dtype=dtype, device=device, show_progress=True)
    log.info("%s in %s on %s", folder.name, dtype, device)
    layout = decoder.kv_layout(settings.page_size, dtype)
    pool, leases = allocate_kv(settings, layout, device, max_context_tokens=context)
    return StandaloneDrafter(ModelRunner(decoder, pool), leases, max_context_tokens=context)
