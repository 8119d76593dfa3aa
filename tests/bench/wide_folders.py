"""Wide copies of models in a folder, written once, mostly by `tests.bench.widen`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from services.draft.algorithm import Algorithm
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


def widened_draft(folder: Path, algorithm: Algorithm, model: Path, draft: Path) -> Path:
    """Returns the folder of a wide copy of a draft, below `folder`: of a head beside the 8B copy of
    its target `model`, or of a language model in the shape of a 1B. Writes what is not there.

    Raises:
        CalledProcessError: as above.
    """
    if not algorithm.reads_features:
        return widened(folder / "draft-1b", draft, "1b")
    target = target_folder(folder)
    wide_head = target / "heads" / algorithm.value.lower()
    if not (is_written(target) and is_written(wide_head)):
        pair = ("--model", str(model), "--head", f"{algorithm.value}={draft}")
        _widen(*pair, "--shape", "8b", "--out", str(target), "--keep")
    return wide_head


def _widen(*arguments: str) -> None:
    subprocess.run([sys.executable, "-m", "tests.bench.widen", *arguments], check=True)
