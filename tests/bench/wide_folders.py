"""Wide copies of models in a folder, written once, mostly by `tests.bench.widen`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.bench.wide_model import INDEX_FILE


def target_folder(folder: Path) -> Path:
    """Returns where programs that share a folder have the 8B target."""
    return folder / "target-8b"


def is_written(folder: Path) -> bool:
    """Whether a folder holds a whole wide copy: what says where its weights are is written last."""
    return (folder / INDEX_FILE).exists()


def widened(folder: Path, source: Path, shape: str) -> Path:
    """Returns `folder` with a copy of `source` in a shape of `widen.SHAPES`.

    Raises:
        CalledProcessError: it cannot be written; the program has said why.
    """
    if not is_written(folder):
        _widen("--model", str(source), "--shape", shape, "--out", str(folder))
    return folder


def widened_with_head(folder: Path, source: Path, algorithm: str, head: Path) -> tuple[Path, Path]:
    """Returns `folder` with an 8B copy of `source`, and the folder of a copy of its head; writes
    what is not there.

    Raises:
        CalledProcessError: as above.
    """
    wide_head = folder / "heads" / algorithm.lower()
    if not (is_written(folder) and is_written(wide_head)):
        model = ("--model", str(source), "--shape", "8b", "--out", str(folder), "--keep")
        _widen(*model, "--head", f"{algorithm}={head}")
    return folder, wide_head


def _widen(*arguments: str) -> None:
    subprocess.run([sys.executable, "-m", "tests.bench.widen", *arguments], check=True)
