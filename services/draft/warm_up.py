"""Warm-up proposals at start: kernels are compiled and tuned, and memory is allocated."""

from __future__ import annotations

import logging
from concurrent.futures import Future
from typing import TYPE_CHECKING

from services.draft.engine import DraftEngine
from services.draft.events import FeatureRows, ProbeDone
from shared.tokens import SamplingParams

if TYPE_CHECKING:
    # A worker without a model runs where torch is not installed.
    from shared.models.heads.feature_spec import FeatureSpec

_NUM_TOKENS = 16
"""More tokens than a head has layers, as each layer reads a token further ahead."""
# Kernels are specialised for prompt lengths and for few or many rows at once.
_PROMPT_LENGTHS = (_NUM_TOKENS, 17, 40, 300, 700)
_GROUP_SIZES = (1, 2, 8, 40)
# Greedy and sampled trees have different scoring kernels and graphs.
_SAMPLINGS = (SamplingParams(temperature=0.0), SamplingParams())

log = logging.getLogger(__name__)


def warm_up(
    engine: DraftEngine, feature_spec: FeatureSpec | None, *, most_at_once: int | None = None
) -> None:
    """Proposes trees of each kind and discards them; waits until that is done.

    Args:
        feature_spec: of the engine's drafter; the features are zeros.
        most_at_once: most sequences at once, on a device whose kernels are compiled on first use:
            then the warm-up uses prompts of many lengths, alone and in groups. None uses one short
            prompt.

    Raises:
        EngineFailed: the drafter cannot compute.
    """
    if most_at_once is None:
        num_proposed = _propose(engine, feature_spec, 1 if feature_spec is None else _NUM_TOKENS, 1)
    else:
        sizes = [size for size in _GROUP_SIZES if size <= most_at_once]
        groups = [(length, size) for size in sizes for length in _PROMPT_LENGTHS]
        num_proposed = sum(_propose(engine, feature_spec, *group) for group in groups)
    if feature_spec is not None and not num_proposed:
        log.warning("warm-up proposed nothing, so the first rounds will be slow")


def _propose(
    engine: DraftEngine, feature_spec: FeatureSpec | None, num_tokens: int, size: int
) -> int:
    """Proposes for `size` prompts at once, for each kind of sampling; returns the trees' tokens."""
    num_proposed = 0
    features = None
    if feature_spec is not None:
        import torch

        shape = (num_tokens - 1, feature_spec.width)
        features = FeatureRows(0, torch.zeros(shape, dtype=feature_spec.dtype))
    for sampling in _SAMPLINGS:
        group: list[Future[ProbeDone]] = [
            engine.propose_once((0,) * num_tokens, sampling, None, features=features)
            for _ in range(size)
        ]
        probes = [future.result() for future in group]
        count = sum(len(probe.tree) for probe in probes if probe.tree is not None)
        log.debug(
            "warm-up: %d prompts of %d tokens took %.3f s and proposed %d tokens",
            *(size, num_tokens, max(probe.draft_s for probe in probes), count),
        )
        num_proposed += count
    return num_proposed
