"""Both wheels, built from a copy of the sources that holds no leftovers of earlier builds."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
_FOLDERS = ("gateway", "services", "shared", "protos", "packaging")
_FILES = ("pyproject.toml", "README.md", "LICENSE")


def build_wheels(source: Path, out: Path) -> dict[str, Path]:
    """Copies the sources into the empty folder `source`; returns the wheels in `out` by name."""
    for name in _FOLDERS:
        ignored = shutil.ignore_patterns("__pycache__", "build", "*.egg-info")
        shutil.copytree(ROOT / name, source / name, ignore=ignored)
    for name in _FILES:
        shutil.copy(ROOT / name, source / name)
    pip(
        "wheel", "--no-build-isolation", "--wheel-dir", str(out), ".", "./packaging/demo", at=source
    )
    return {path.name.partition("-")[0]: path for path in out.glob("*.whl")}


def pip(command: str, *arguments: str, at: Path) -> None:
    """Runs this environment's pip, which fetches nothing."""
    words = [sys.executable, "-m", "pip", command, "--quiet", "--no-deps", "--no-index", *arguments]
    subprocess.run(words, cwd=at, check=True)
