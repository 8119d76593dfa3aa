"""A cache of the Hugging Face Hub, filled by hand, for `HF_HUB_OFFLINE=1`."""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path


def add_to_cache(cache: Path, model_id: str, source: Path, *, revision: str = "main") -> Path:
    """Adds the files of a folder as a revision of a model; returns the snapshot's folder."""
    root = cache / f"models--{model_id.replace('/', '--')}"
    commit = hashlib.sha1(f"{model_id}@{revision}".encode()).hexdigest()
    reference = root / "refs" / revision
    reference.parent.mkdir(parents=True, exist_ok=True)
    reference.write_text(commit)
    snapshot = root / "snapshots" / commit
    shutil.copytree(source, snapshot)
    return snapshot
