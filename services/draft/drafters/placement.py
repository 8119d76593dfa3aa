"""Device, context length and KV pages of a drafter, from the settings."""

from __future__ import annotations

import logging
from dataclasses import dataclass

import torch

from services.draft.settings import DraftSettings
from shared.errors import CheckpointError, SettingsError
from shared.kv.leases import KvLeases
from shared.kv.pool import KvLayout, KvPool
from shared.layers.linear import num_saved_bytes
from shared.layers.tensor_group import TensorGroup
from shared.model_options import AttentionBackend
from shared.models.config import ModelConfig
from shared.models.decoder import Decoder
from shared.models.heads.feature_spec import FeatureSpec
from shared.models.heads.head import DraftHead
from shared.runtime.device import device_named, launch_on
from shared.runtime.graphs import GraphLimits, graph_memory_bytes
from shared.runtime.memory import CacheSize, Shortage, free_memory_bytes, num_pages_for
from shared.runtime.tree_pass import PassLimits, head_memory_bytes, num_pass_rows

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


def log_quantisation(model: object) -> None:
    """Says what 8-bit weights save; silent without them."""
    size_bytes = num_saved_bytes(model)
    if size_bytes:
        log.info("8-bit layers save %.1f MiB", size_bytes / 2**20)


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


# The target in whose process a drafter runs, as far as the drafter's memory depends on it.


@dataclass(frozen=True, slots=True)
class Host:
    """Objects that a target shares with a drafter in its process.

    Attributes:
        decoder: shares its tensors; None where they are read from the target's folder.
        num_tokens: of the target's cache; None where that is in another process.
        cache: of the target, which takes what the drafter may lack; None likewise.
        round_bytes: of the GPU's memory, what rounds of the target with the drafter's model take.
        vocab_size: of the target; 0 where it is in another process.
    """

    decoder: Decoder | None = None
    num_tokens: int | None = None
    cache: CacheSize | None = None
    round_bytes: int = 0
    vocab_size: int = 0

    def reserved_bytes(
        self, device: torch.device, own_bytes: int, spec: FeatureSpec | None = None
    ) -> int:
        """Returns what a drafter's cache leaves to others: to its own passes, to the features that
        it reads, and to rounds, of what is free beside those at most half.

        Args:
            own_bytes: of its own passes.
            spec: None for a drafter that reads no features.
        """
        taken = own_bytes + (0 if spec is None else self.feature_bytes(spec))
        if not self.round_bytes:
            return taken
        return taken + min(self.round_bytes, max(0, free_memory_bytes(device) - taken) // 2)

    @property
    def most_tokens(self) -> int | None:
        """Tokens beyond which a head's cache is of no use: as many as the target's, and as many
        again for rounds on the device, which get half of the pages."""
        return None if self.num_tokens is None else 2 * self.num_tokens

    def no_memory(self, shortage: Shortage) -> str:
        """Returns that the drafter does not fit, and what to lower."""
        if self.cache is not None:
            return f"the draft does not fit beside its target: {self.cache.advice(shortage)}"
        return (
            f"the draft does not fit its device: {shortage}; lower its --mem-fraction-static or "
            f"--max-running-requests, or the --mem-fraction-static of a target on the same device"
        )

    def feature_bytes(self, spec: FeatureSpec) -> int:
        """Returns the memory that the target will want once it knows of the head: it keeps a row
        for each token of its cache."""
        return (self.num_tokens or 0) * spec.width * spec.dtype.itemsize


# The sizes and the memory of passes that grow whole trees.


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
