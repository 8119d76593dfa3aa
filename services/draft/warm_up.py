"""The first proposals of a drafter, before anyone waits for one: kernels are compiled and tuned,
and memory is allocated, at start."""

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
"""More than a head has layers: each reads a token further ahead."""
# Kernels are compiled for kinds of prompt lengths, and for few or many rows at once.
_PROMPT_LENGTHS = (_NUM_TOKENS, 17, 40, 300, 700)
_GROUP_SIZES = (1, 2, 8, 40)
# Greedy and drawn trees are scored by kernels, and graphs, of their own.
_SAMPLINGS = (SamplingParams(temperature=0.0), SamplingParams())

log = logging.getLogger(__name__)


def warm_up(
    engine: DraftEngine, feature_spec: FeatureSpec | None, *, most_at_once: int | None = None
) -> None:
    """Proposes trees of each kind and forgets them; waits until that is done.

    Args:
        feature_spec: of the engine's drafter; its features are zeros.
        most_at_once: sequences that there may be, on a device whose kernels are compiled on first
            use: then prompts of many lengths are proposed for, alone and in groups. None proposes
            for one short prompt.

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
    """Proposes for as many prompts at once, for each kind of sampling; returns how many tokens the
    trees have."""
    num_proposed = 0
    features = None if feature_spec is None else _zero_features(feature_spec, num_tokens - 1)
    for sampling in _SAMPLINGS:
        group: list[Future[ProbeDone]] = [
            engine.propose_once((0,) * num_tokens, sampling, None, features=features)
            for _ in range(size)
        ]
        done = [each.result() for each in group]
        count = sum(len(each.tree) for each in done if each.tree is not None)
        log.debug(
            "warm-up: %d prompts of %d tokens took %.3f s and proposed %d tokens",
            *(size, num_tokens, max(each.draft_s for each in done), count),
        )
        num_proposed += count
    return num_proposed


def _zero_features(spec: FeatureSpec, num_rows: int) -> FeatureRows:
    import torch

    return FeatureRows(0, torch.zeros(num_rows, spec.width, dtype=spec.dtype))
