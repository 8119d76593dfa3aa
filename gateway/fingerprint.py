"""`system_fingerprint`: what an answer depends on beside its request."""

from __future__ import annotations

import hashlib
from functools import lru_cache

from gateway.generation import TargetModel
from shared.version import package_version


@lru_cache(maxsize=64)
def fingerprint(model: TargetModel) -> str:
    """Returns the same text for the same model, tokenizer and version of this package."""
    parts = (package_version(), model.model_id, model.tokenizer_sha256, str(model.vocab_size))
    return f"fp_{hashlib.sha256(':'.join(parts).encode()).hexdigest()[:12]}"
