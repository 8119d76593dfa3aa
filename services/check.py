"""`outrider check LINE`: what `outrider serve LINE` would start, where, and with how much memory.

Loads configurations and no weights, starts nothing and fetches nothing.
"""

from __future__ import annotations

from pathlib import Path

import torch

from services.draft.drafter_factory import check_no_states
from services.ranks import Ranks
from services.serve import ready_line
from services.serve_plan import Plan, PlannedDraft
from services.serve_settings import Placement
from services.target.engine_factory import check_recurrent
from shared.errors import SettingsError
from shared.hub import shown_name
from shared.model_options import Dtype
from shared.models.checkpoint import Checkpoint
from shared.models.config import ModelConfig
from shared.runtime.device import device_named, dtype_named, kv_dtype_named
from shared.settings import shown_settings
from shared.settings_field import declared_fields

_MEMORY_FILE = Path("/proc/meminfo")


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
    lines = [*_target_lines(plan, config, device)]
    for draft in plan.drafts:
        lines += _draft_lines(plan, draft)
    address, tokenizer = f"{plan.gateway.host}:{plan.gateway.port}", plan.gateway.tokenizer
    lines.append(f"gateway: {address}, tokenizer of {shown_name(tokenizer)}")
    lines += _given(plan.gateway)
    lines += [f"note: {notice}" for notice in plan.notices]
    _check_memory(plan, device)
    return "\n".join([*lines, f"would say: {ready_line(plan)}"])


def _target_lines(plan: Plan, config: ModelConfig, device: torch.device) -> list[str]:
    target = plan.target
    dtype = dtype_named(target.dtype, config.dtype, device)
    kv_dtype = kv_dtype_named(target.kv_cache_dtype, dtype)
    channels = config.num_cache_layers * config.num_kv_heads * config.head_dim
    token_bytes = 2 * channels * kv_dtype.itemsize
    state = "" if config.delta is None else f", {_gib(config.delta.state_bytes)} a running request"
    context = min(
        target.context_length or config.max_position_embeddings, config.max_position_embeddings
    )
    return [
        f"target: {shown_name(target.model_path)}, {config.architecture}, "
        f"{str(dtype).removeprefix('torch.')} on {_devices(device, target.ranks)}, "
        f"port {target.port}",
        f"  weights {_gib(_weight_bytes(target.model_path))} on disk, "
        f"{token_bytes / 1024:g} KiB of KV a token{state}, context {context}",
        *_given(target),
    ]


def _draft_lines(plan: Plan, draft: PlannedDraft) -> list[str]:
    settings = draft.settings
    model = "no model"
    if settings.algorithm.has_model:
        folder = settings.model_folder
        model = f"{shown_name(folder)}, {_gib(_weight_bytes(folder))} on disk"
    where = f"on {settings.device}, port {settings.port}"
    if plan.placement is Placement.EMBEDDED:
        where = "in the target's process"
    shape = settings.shape
    pinned = "as set" if settings.is_shape_pinned else "automatic"
    return [
        f"{draft.name}: {draft.algorithm}, {model}, {where}",
        f"  trees of {shape.num_steps} steps, topk {shape.topk}, {shape.num_draft_tokens} tokens "
        f"({pinned})",
        *_given(settings),
    ]


def _given(settings: object) -> list[str]:
    """Returns a line with the settings that differ from the defaults."""
    shown = shown_settings(settings)
    given = [
        f"{field.flag} {shown[field.flag.removeprefix('--')]}"
        for field in declared_fields(type(settings))
        if not field.is_secret and getattr(settings, field.name) != field.default
    ]
    return [f"  set: {', '.join(given)}"] if given else []


def _check_memory(plan: Plan, device: torch.device) -> None:
    folders = [plan.target.model_path]
    if device.type == "cpu" or plan.placement is Placement.EMBEDDED:
        folders += [
            draft.settings.model_folder
            for draft in plan.drafts
            if draft.settings.algorithm.has_model
        ]
    needed = sum(map(_weight_bytes, folders)) / plan.target.ranks.size
    free = _free_bytes(device)
    is_widened = device.type == "cpu" and plan.target.dtype in (Dtype.AUTO, Dtype.FLOAT32)
    if free is not None and needed * (2 if is_widened else 1) > free:
        widened = " and twice that in float32" if is_widened else ""
        raise SettingsError(
            (
                f"the weights take {_gib(needed)} on disk{widened}; {device} has {_gib(free)}; "
                f"take a smaller model, --quantization fp8, or more GPUs by --tp-size or --pp-size",
            )
        )


def _free_bytes(device: torch.device) -> float | None:
    """Returns the free memory of a device, None if it is unknown."""
    if device.type == "cuda":
        return float(torch.cuda.mem_get_info(device)[0])
    if not _MEMORY_FILE.is_file():
        return None
    lines = dict(line.split(":", 1) for line in _MEMORY_FILE.read_text().splitlines())
    return 1024.0 * float(lines["MemAvailable"].split()[0])


def _weight_bytes(folder: Path) -> int:
    return Checkpoint.open(folder).size_bytes


def _devices(device: torch.device, ranks: Ranks) -> str:
    count, hosts = ranks.num_here, ranks.num_hosts
    here = f"{device}" if count == 1 else f"{count} GPUs from {device} on"
    return here if hosts == 1 else f"{here} of each of {hosts} hosts"


def _gib(num_bytes: float) -> str:
    return f"{num_bytes / 2**30:.2f} GiB" if num_bytes >= 2**28 else f"{num_bytes / 2**20:.1f} MiB"
