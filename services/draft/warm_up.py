"""The first proposal of a drafter, before anyone waits for one: kernels are compiled and tuned, and
memory is allocated, at start."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from services.draft.engine import DraftEngine
from services.draft.events import FeatureRows
from shared.tokens import SamplingParams

if TYPE_CHECKING:
    # A worker without a model runs where torch is not installed.
    from shared.models.heads.feature_spec import FeatureSpec

_NUM_TOKENS = 16
"""More than a head has layers: each reads a token further ahead."""
# Greedy and drawn trees are scored by kernels, and graphs, of their own.
_SAMPLINGS = (SamplingParams(temperature=0.0), SamplingParams())

log = logging.getLogger(__name__)


def warm_up(engine: DraftEngine, feature_spec: FeatureSpec | None) -> None:
    """Proposes a tree of each kind and forgets it; waits until that is done.

    Args:
        feature_spec: of the engine's drafter; its features are zeros.

    Raises:
        EngineFailed: the drafter cannot compute.
    """
    num_tokens = 1 if feature_spec is None else _NUM_TOKENS
    features = None if feature_spec is None else _zero_features(feature_spec, num_tokens - 1)
    tokens = (0,) * num_tokens
    done = [
        engine.propose_once(tokens, sampling, None, features=features).result()
        for sampling in _SAMPLINGS
    ]
    num_proposed = [None if each.tree is None else len(each.tree) for each in done]
    for each, count in zip(done, num_proposed, strict=True):
        log.debug("warm-up took %.3f s and proposed %s tokens", each.draft_s, count)
    if feature_spec is not None and not any(num_proposed):
        log.warning("warm-up proposed nothing, so the first rounds will be slow")


def _zero_features(spec: FeatureSpec, num_rows: int) -> FeatureRows:
    import torch

    return FeatureRows(0, torch.zeros(num_rows, spec.width, dtype=spec.dtype))
