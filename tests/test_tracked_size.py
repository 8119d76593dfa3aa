"""What a clone holds stays small: most of it are the demo's checkpoints."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
MAX_BYTES = 36 * 1024**2


def test_tracked_files_are_within_their_limit() -> None:
    if not (ROOT / ".git").exists():
        pytest.skip("not a checkout of git")
    listing = ["git", "ls-files", "-z", "--cached"]
    names = subprocess.run(listing, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    paths = (ROOT / name for name in names.split("\0") if name)
    sizes = {path: path.lstat().st_size for path in paths if path.is_file() or path.is_symlink()}
    largest = sorted(sizes, key=lambda path: -sizes[path])[:5]
    assert sum(sizes.values()) <= MAX_BYTES, [str(path.relative_to(ROOT)) for path in largest]
