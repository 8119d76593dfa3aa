"""A fingerprint of all that an output depends on beside its request: weights, and settings of
numerics and sampling."""

from __future__ import annotations

import hashlib
from pathlib import Path

from services.target.settings import TargetSettings

_SETTINGS = (
    *("dtype", "quantization", "kv_cache_dtype", "attention_backend", "device", "tp_size"),
    "ep_size",
    *("enable_deterministic_inference", "verification_mode", "context_length"),
    *("speculative_use_rejection_sampling", "speculative_use_block_verification"),
    *("speculative_accept_threshold_single", "speculative_accept_threshold_acc"),
)
_SUFFIXES = (".json", ".safetensors", ".bin", ".jinja")
_NUM_SAMPLES = 16
_SAMPLE_BYTES = 65_536


def output_fingerprint(settings: TargetSettings) -> str:
    """Returns 16 hexadecimal digits. Large files are known by their sizes and some of their bytes:
    reading all of them would take as long as loading them."""
    digest = hashlib.sha256()
    for name in _SETTINGS:
        digest.update(f"{name}={getattr(settings, name)}\n".encode())
    folder = Path(settings.model_path)
    for path in sorted(folder.glob("*")) if folder.is_dir() else ():
        if path.suffix in _SUFFIXES:
            digest.update(f"{path.name}:{path.stat().st_size}\n".encode())
            _add_samples(digest, path)
    return digest.hexdigest()[:16]


def _add_samples(digest: hashlib._Hash, path: Path) -> None:
    size = path.stat().st_size
    step = max(size // _NUM_SAMPLES, _SAMPLE_BYTES)
    with path.open("rb") as file:
        for offset in range(0, size, step):
            file.seek(offset)
            digest.update(file.read(_SAMPLE_BYTES))
