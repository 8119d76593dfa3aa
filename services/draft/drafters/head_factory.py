"""Loads a draft head or next-token layers, what they borrow from their target, and their KV
pool."""

from __future__ import annotations

import logging
from dataclasses import replace

import torch

from services.draft.algorithm import Algorithm
from services.draft.drafters.contexts import CONTEXT_MARGIN
from services.draft.drafters.eagle import EagleDrafter
from services.draft.drafters.multi_layer import MultiLayerDrafter
from services.draft.drafters.placement import (
    Host,
    allocate_kv,
    context_for,
    device_for,
    is_cut_short,
    log_quantisation,
    pass_limits,
    reserved_for_head,
)
from services.draft.settings import DraftSettings
from shared.models.config import ModelConfig
from shared.models.heads.config import HeadConfig, HeadKind
from shared.models.heads.loader import load_head, read_token_map
from shared.models.heads.mtp_loader import load_mtp
from shared.models.heads.target_tensors import target_tensors
from shared.runtime.device import dtype_named
from shared.runtime.tree_grower import TreeGrower
from shared.runtime.tree_model import HeadModel

_KINDS = {Algorithm.EAGLE: HeadKind.EAGLE, Algorithm.EAGLE3: HeadKind.EAGLE3}

log = logging.getLogger(__name__)


def build_head(settings: DraftSettings, host: Host | None = None) -> EagleDrafter:
    """Returns the drafter of an EAGLE or EAGLE3 head, or of next-token layers, with weights loaded.

    Args:
        host: the target of this process, if there is one.

    Raises:
        CheckpointError: a folder cannot be served, or the head was made for another target.
        SettingsError: memory does not hold what the settings ask for.
    """
    host = host or Host()
    folder, kind = settings.model_folder, _KINDS.get(settings.algorithm)
    target = ModelConfig.from_folder(settings.target_folder)
    config: HeadConfig | ModelConfig
    if kind is None:
        config = ModelConfig.from_folder(folder)
    else:
        config = HeadConfig.from_folder(folder, kind, target)
    device = device_for(settings)
    dtype = dtype_named(settings.dtype, config.dtype, device)
    tensors = target_tensors(settings.target_folder, host.decoder, dtype=dtype, device=device)
    context = context_for(settings, config.max_position_embeddings, margin_tokens=CONTEXT_MARGIN)
    is_shorter = is_cut_short(context, target.max_position_embeddings)
    options = settings.model_options
    if kind is None:
        head = load_mtp(folder, tensors, dtype=dtype, device=device, options=options)
    else:
        token_map = _token_map(settings, kind, target.vocab_size)
        head = load_head(
            folder, kind, tensors, dtype=dtype, device=device, token_map=token_map, options=options
        )
    log.info(
        "%s in %s on %s: %d layers, %d of %d tokens, features of layers %s, %d wide",
        *(folder.name, head.dtype, head.device, len(head.layers)),
        *(head.vocabulary.size, head.config.vocab_size),
        *(list(head.feature_spec.layer_indices), head.feature_spec.width),
    )
    log_quantisation(head)
    has_one_layer = len(head.layers) == 1
    limits = pass_limits(settings, device, max_context_tokens=context)
    # Several layers grow no whole trees in one pass, and share no prefixes.
    reserved = reserved_for_head(settings, head, limits) if has_one_layer else 0
    pool, leases = allocate_kv(
        settings if has_one_layer else replace(settings, disable_radix_cache=True),
        head.kv_layout(settings.page_size, dtype),
        device,
        max_context_tokens=context,
        reserved_bytes=host.reserved_bytes(device, reserved, head.feature_spec),
        most_tokens=host.most_tokens,
    )
    model = HeadModel(head, pool)
    if not has_one_layer:
        return MultiLayerDrafter(
            model, leases, max_context_tokens=context, keeps_features=is_shorter
        )
    return EagleDrafter(
        model,
        leases,
        max_context_tokens=context,
        keeps_features=is_shorter,
        grower=TreeGrower(model, limits),
    )


def _token_map(settings: DraftSettings, kind: HeadKind, vocab_size: int) -> torch.Tensor | None:
    path = settings.speculative_token_map
    if path is None:
        return None
    if kind is HeadKind.EAGLE3:
        log.warning("--speculative-token-map is ignored: EAGLE3 heads bring their own vocabulary")
        return None
    return read_token_map(path, vocab_size)
