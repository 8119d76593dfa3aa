"""`outrider check LINE`: what `outrider serve LINE` would start, where, and with how much memory.

Loads configurations and no weights, starts nothing and fetches nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch

from services.draft.drafter_factory import check_no_states
from services.ranks import Ranks
from services.serve import ready_line
from services.serve_plan import Plan, PlannedDraft
from services.serve_settings import Placement
from services.target.engine_factory import MOST_FULL_SEQUENCES, check_recurrent
from shared.errors import SettingsError
from shared.hub import shown_name
from shared.kv.pool import KvLayout
from shared.model_options import Dtype, Quantisation
from shared.models.checkpoint import Checkpoint
from shared.models.config import ModelConfig
from shared.runtime.device import device_named, dtype_named, kv_dtype_named
from shared.runtime.memory import free_memory_bytes, in_words, num_pages_for
from shared.settings import shown_settings
from shared.settings_field import declared_fields


def check(plan: Plan) -> str:
    """Returns a description of what a plan would start.

    Raises:
        CheckpointError: a model's config.json cannot be served, or its weights are missing.
        SettingsError: there is no such device, weights are larger than its memory, or a flag does
            not fit the model.
    """
    device = device_named(plan.target.device)
    config = ModelConfig.from_folder(plan.target.model_path)
    check_recurrent(plan.target, config)
    for draft in plan.drafts:
        check_no_states(draft.settings)
    free = free_memory_bytes(device)
    _check_memory(plan, device, free)
    lines = [*_target_lines(plan, config, device, free)]
    for draft in plan.drafts:
        lines += _draft_lines(plan, draft)
    address, tokenizer = f"{plan.gateway.host}:{plan.gateway.port}", plan.gateway.tokenizer
    lines.append(f"gateway: {address}, tokenizer of {shown_name(tokenizer)}")
    lines += _given(plan.gateway)
    lines += [f"note: {notice}" for notice in plan.notices]
    return "\n".join([*lines, f"would say: {ready_line(plan)}"])


def _target_lines(
    plan: Plan, config: ModelConfig, device: torch.device, free: int
) -> Iterator[str]:
    target = plan.target
    dtype = dtype_named(target.dtype, config.dtype, device)
    layout = KvLayout(
        num_layers=config.num_cache_layers,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        page_size=target.page_size,
        dtype=kv_dtype_named(target.kv_cache_dtype, dtype),
        has_values=config.latent is None,
    )
    state = 0 if config.delta is None else config.delta.state_bytes
    a_request = f", {in_words(state)} a running request" if state else ""
    context = min(
        target.context_length or config.max_position_embeddings, config.max_position_embeddings
    )
    yield (
        f"target: {shown_name(target.model_path)}, {config.architecture}, "
        f"{str(dtype).removeprefix('torch.')} on {_devices(device, target.ranks)}, "
        f"port {target.port}"
    )
    yield (
        f"  weights {in_words(_weight_bytes(target.model_path))} on disk, "
        f"{layout.token_size_bytes / 1024:g} KiB of KV a token{a_request}, context {context}"
    )
    weights = _loaded_bytes(plan, config, dtype, device.type)
    yield _memory_line(plan, layout, context, weights, state, free)
    yield from _given(target)


def _memory_line(
    plan: Plan, layout: KvLayout, context: int, weights: int, state: int, free: int
) -> str:
    """Returns what each process of the target takes, approximately: graphs come on top.

    Args:
        layout: of the whole cache.
        context: tokens of the longest sequence.
        weights, state: bytes of the weights, and of the recurrent state of a sequence.
        free: bytes that are free on the device.
    """
    target, ranks = plan.target, plan.target.ranks
    spread = 1 if target.enable_dp_attention else ranks.tp_size
    own = replace(
        layout,
        num_layers=-(-layout.num_layers // ranks.pp_size),
        num_kv_heads=max(1, layout.num_kv_heads // spread),
    )
    weights, states = weights // ranks.size, state * target.max_running_requests // ranks.size
    most_tokens = MOST_FULL_SEQUENCES * target.max_running_requests * context
    num_pages = num_pages_for(
        own,
        device_named(target.device),
        mem_fraction_static=target.mem_fraction_static,
        max_total_tokens=target.max_total_tokens,
        max_sequence_length=min(context, target.max_total_tokens or context),
        reserved_bytes=weights + states,
        most_tokens=None if target.mem_fraction_static else most_tokens,
        free_bytes=free,
    )
    cache = num_pages * own.page_size_bytes
    parts = [f"weights {in_words(weights)}"]
    parts += [f"states {in_words(states)}"] if states else []
    parts += [f"KV of {(num_pages - 1) * own.page_size:,} tokens {in_words(cache)}"]
    each = " of each process" if ranks.size > 1 else ""
    return (
        f"  memory{each}: about {in_words(weights + states + cache)} of {in_words(free)} free: "
        f"{', '.join(parts)}"
    )


def _draft_lines(plan: Plan, draft: PlannedDraft) -> Iterator[str]:
    settings, shape = draft.settings, draft.settings.shape
    model, where = "no model", f"port {settings.port}"
    if settings.algorithm.has_model:
        folder = settings.model_folder
        model = f"{shown_name(folder)}, {in_words(_weight_bytes(folder))} on disk"
        where = f"on {device_named(settings.device)}, {where}"
    if plan.placement is Placement.EMBEDDED:
        where = "in the target's process"
    why = "as set" if settings.is_shape_pinned else "automatic"
    asked, tokens = settings.speculative_num_draft_tokens, shape.num_draft_tokens
    if asked not in (None, tokens):
        why = f"{asked} asked; a chain of {shape.num_steps} has {tokens}"
    yield f"{draft.name}: {draft.algorithm}, {model}, {where}"
    yield f"  trees of {shape.num_steps} steps, topk {shape.topk}, {tokens} tokens ({why})"
    yield from _given(settings)


def _given(settings: object) -> list[str]:
    """Returns a line with the settings that differ from the defaults."""
    shown = shown_settings(settings)
    given = [
        f"{field.flag} {shown[field.flag.removeprefix('--')]}"
        for field in declared_fields(type(settings))
        if not field.is_secret and getattr(settings, field.name) != field.default
    ]
    return [f"  set: {', '.join(given)}"] if given else []


def _check_memory(plan: Plan, device: torch.device, free: int) -> None:
    folders = [plan.target.model_path]
    if device.type == "cpu" or plan.placement is Placement.EMBEDDED:
        folders += _draft_folders(plan)
    needed = sum(map(_weight_bytes, folders)) // plan.target.ranks.size
    is_widened = device.type == "cpu" and plan.target.dtype in (Dtype.AUTO, Dtype.FLOAT32)
    if needed * (2 if is_widened else 1) > free:
        widened = " and twice that in float32" if is_widened else ""
        raise SettingsError(
            (
                f"the weights take {in_words(needed)} on disk{widened}; {device} has "
                f"{in_words(free)}; take a smaller model, --quantization fp8, or more GPUs by "
                f"--tp-size or --pp-size",
            )
        )


def _loaded_bytes(plan: Plan, config: ModelConfig, dtype: torch.dtype, device: str) -> int:
    """Returns the approximate size in memory of the weights of the target and of a draft in its
    process. Weights in 8 bits keep them on GPUs alone, unless --quantization says so.

    Args:
        device: the kind of device.
    """
    target = plan.target
    checkpoint = Checkpoint.open(target.model_path)
    is_packed = bool(checkpoint.packed or checkpoint.words)
    stored = 1 if checkpoint.scales else (config.dtype or dtype).itemsize
    is_kept = bool(checkpoint.scales) and not checkpoint.packed and device == "cuda"
    is_8_bit = is_kept or target.quantization is not Quantisation.UNQUANT
    size = checkpoint.size_bytes * (1 if is_8_bit else dtype.itemsize) * (1 + is_packed) // stored
    embedded = _draft_folders(plan) if plan.placement is Placement.EMBEDDED else []
    return size + sum(map(_weight_bytes, embedded))


def _draft_folders(plan: Plan) -> list[Path]:
    drafts = (draft.settings for draft in plan.drafts)
    return [draft.model_folder for draft in drafts if draft.algorithm.has_model]


def _weight_bytes(folder: Path) -> int:
    return Checkpoint.open(folder).size_bytes


def _devices(device: torch.device, ranks: Ranks) -> str:
    count, hosts = ranks.num_here, ranks.num_hosts
    here = f"{device}"
    if count > 1:
        is_cpu = device.type == "cpu"
        here = f"{device}, {count} processes" if is_cpu else f"{count} GPUs from {device} on"
    return here if hosts == 1 else f"{here} of each of {hosts} hosts"
