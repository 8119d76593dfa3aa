"""Wide copies of models in a folder, written once by `tests.bench.widen`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def widened(folder: Path, source: Path, shape: str) -> Path:
    """Returns `folder` with a copy of `source` in a shape of `widen.SHAPES`.

    Raises:
        CalledProcessError: it cannot be written; the program has said why.
    """
    if not (folder / "config.json").exists():
        _widen("--model", str(source), "--shape", shape, "--out", str(folder))
    return folder


def widened_with_head(folder: Path, source: Path, algorithm: str, head: Path) -> tuple[Path, Path]:
    """Returns `folder` with an 8B copy of `source`, and the folder of a copy of its head.

    Raises:
        CalledProcessError: as above.
    """
    wide_head = folder / "heads" / algorithm.lower()
    if not (folder / "config.json").exists() or not (wide_head / "config.json").exists():
        model = ("--model", str(source), "--shape", "8b", "--out", str(folder))
        _widen(*model, "--head", f"{algorithm}={head}")
    return folder, wide_head


def _widen(*arguments: str) -> None:
    subprocess.run([sys.executable, "-m", "tests.bench.widen", *arguments], check=True)
