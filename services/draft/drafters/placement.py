"""Device, context length and KV pages of a drafter, from the settings."""

from __future__ import annotations

import logging

import torch

from services.draft.settings import DraftSettings
from shared.errors import CheckpointError, SettingsError
from shared.kv.leases import KvLeases
from shared.kv.pool import KvLayout, KvPool
from shared.layers.linear import num_saved_bytes
from shared.layers.tensor_group import TensorGroup
from shared.model_options import AttentionBackend, Quantisation
from shared.runtime.device import device_named, launch_on
from shared.runtime.memory import num_pages_for

log = logging.getLogger(__name__)


def device_for(settings: DraftSettings) -> torch.device:
    """Returns the device, on which this thread launches from now on.

    Raises:
        SettingsError: it lacks what other settings need.
    """
    device = device_named(settings.device)
    if device.type == "cuda":
        launch_on(device)
        return device
    problems = []
    if settings.speculative_draft_attention_backend is AttentionBackend.TRITON:
        problems.append("--speculative-draft-attention-backend: triton needs CUDA")
    if settings.enable_cuda_graph:
        problems.append("--enable-cuda-graph needs CUDA")
    if problems:
        raise SettingsError(tuple(f"{problem}; the device is {device}" for problem in problems))
    return device


def log_quantisation(settings: DraftSettings, model: object) -> None:
    """Says what 8-bit weights save; silent without them."""
    quantisation = settings.speculative_draft_model_quantization
    if quantisation is not Quantisation.UNQUANT:
        saved_mib = num_saved_bytes(model) / 2**20
        log.info("layers in %s take %.1f MiB less", quantisation.value, saved_mib)


def context_for(settings: DraftSettings, longest: int, *, margin_tokens: int) -> int:
    """Returns the tokens a forward can look back on: those of `--context-length`, or all that the
    checkpoint has positions for. A larger `--context-length` is cut to that, with a warning.

    Args:
        longest: positions of the checkpoint.
        margin_tokens: what a tree takes of it; a window size leaves it out of account.

    Raises:
        CheckpointError: no room is left for a context beside a tree.
    """
    wanted = settings.context_length or longest
    if wanted > longest:
        log.warning(
            "--context-length is %d; the draft's checkpoint has positions for %d, which are taken",
            *(wanted, longest),
        )
    context = min(wanted, longest, settings.max_total_tokens or longest)
    if settings.speculative_draft_window_size is not None:
        context = min(context, settings.speculative_draft_window_size + margin_tokens)
    if context < 2 * margin_tokens:
        raise CheckpointError(
            f"the draft's context is {context} tokens; trees need {margin_tokens} of it, so at "
            f"least {2 * margin_tokens} are wanted"
        )
    return context


def is_cut_short(context: int, target_tokens: int) -> bool:
    """Whether a head looks back on less than its target's longest sequence, which it then says.

    Args:
        target_tokens: what the target was trained on.
    """
    if context >= target_tokens:
        return False
    log.warning(
        "the draft's context is %d tokens, the target's %d: longer sequences are drafted from "
        "their last tokens",
        *(context, target_tokens),
    )
    return True


def allocate_kv(
    settings: DraftSettings,
    layout: KvLayout,
    device: torch.device,
    *,
    max_context_tokens: int,
    reserved_bytes: int = 0,
    most_tokens: int | None = None,
    group: TensorGroup | None = None,
) -> tuple[KvPool, KvLeases]:
    """Allocates the KV pool; call it once the weights are loaded.

    Args:
        reserved_bytes: memory that something else will take.
        most_tokens: see `num_pages_for`.
        group: processes that hold a part of each page; all of them call this at the same time.

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
        reserved_bytes=reserved_bytes,
        most_tokens=most_tokens,
    )
    if group is not None:
        # Pages are leased by rank 0 alone, so all must have them.
        num_pages = group.least(num_pages, device)
    leases = KvLeases(num_pages, settings.page_size, prefix_cache=not settings.disable_radix_cache)
    log.info("%s KV pages of %d tokens", f"{leases.num_pages:,}", settings.page_size)
    return KvPool(layout, num_pages, device), leases
