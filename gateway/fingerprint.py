"""`system_fingerprint`: what an answer depends on beside its request."""

from __future__ import annotations

import hashlib
from functools import lru_cache

from gateway.generation import TargetModel
from shared.version import package_version


@lru_cache(maxsize=64)
def fingerprint(model: TargetModel) -> str:
    """Returns the same text for the same weights, settings, tokenizer and version."""
    weights = (model.output_fingerprint, model.weight_version)
    parts = (package_version(), model.model_id, model.tokenizer_sha256, *weights)
    return f"fp_{hashlib.sha256(':'.join(parts).encode()).hexdigest()[:12]}"
