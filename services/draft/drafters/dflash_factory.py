"""Loads a DFlash head, what it borrows from its target, and its KV pool."""

from __future__ import annotations

import logging

from services.draft.drafters.dflash import DflashDrafter
from services.draft.drafters.host import Host
from services.draft.drafters.placement import context_for, device_for, log_quantisation
from services.draft.settings import DraftSettings
from services.draft.settings_problems import block_problems
from shared.errors import SettingsError
from shared.kv.pool import KvPool
from shared.models.config import ModelConfig
from shared.models.heads.dflash import DflashConfig, load_dflash
from shared.models.heads.target_tensors import target_tensors
from shared.runtime.device import dtype_named
from shared.runtime.head_runner import BlockRunner
from shared.runtime.memory import num_pages_for

log = logging.getLogger(__name__)


def build_dflash(settings: DraftSettings, host: Host | None = None) -> DflashDrafter:
    """Returns the drafter with weights loaded.

    Args:
        host: the target of this process, if there is one.

    Raises:
        CheckpointError: a folder cannot be served, or the head was made for another target.
        SettingsError: memory does not hold what the settings ask for.
    """
    host = host or Host()
    folder = settings.model_folder
    target_config = ModelConfig.from_folder(settings.target_folder)
    config = DflashConfig.from_folder(folder, target_config)
    device = device_for(settings)
    dtype = dtype_named(settings.dtype, config.layers.dtype, device)
    tensors = target_tensors(settings.target_folder, host.decoder, dtype=dtype, device=device)
    block_size = settings.speculative_dflash_block_size or config.block_size
    problems = block_problems(settings, block_size)
    if problems:
        raise SettingsError(problems)
    longest = config.layers.max_position_embeddings
    context = context_for(settings, longest, margin_tokens=block_size)
    head = load_dflash(folder, tensors, dtype=dtype, device=device, options=settings.model_options)
    log_quantisation(settings, head)
    log.info("%s in %s on %s: blocks of %d", folder.name, dtype, device, block_size)
    layout = head.kv_layout(settings.page_size, dtype)
    num_pages = num_pages_for(
        layout,
        device,
        mem_fraction_static=settings.mem_fraction_static,
        max_total_tokens=settings.max_total_tokens,
        max_sequence_length=context,
        reserved_bytes=host.feature_bytes(head.feature_spec),
        most_tokens=host.most_tokens,
    )
    window = _window(settings, context, block_size, num_pages)
    log.info("%s KV pages of %d tokens", f"{num_pages - 1:,}", settings.page_size)
    if window + block_size < target_config.max_position_embeddings:
        log.warning(
            "the draft looks back on %d tokens; the target's context is %d",
            *(window, target_config.max_position_embeddings),
        )
    pool = KvPool(layout, num_pages, device)
    runner = BlockRunner(head, pool)
    return DflashDrafter(runner, num_pages, block_size=block_size, window_tokens=window)


def _window(settings: DraftSettings, context: int, block_size: int, num_pages: int) -> int:
    """Returns the tokens before a block that the drafter may keep, a page more while it slides.

    Raises:
        SettingsError: the pool is too small for any.
    """
    num_slots = (num_pages - 1) * settings.page_size
    window = min(context, num_slots - settings.page_size + 1) - block_size
    if window < 1:
        raise SettingsError(
            (
                f"--max-total-tokens gives {num_slots} tokens; a block of {block_size}, a page of "
                f"{settings.page_size} and a token to look back on do not fit",
            )
        )
    return window
