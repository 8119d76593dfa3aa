"""Measured figures, and the files in which programs of this folder leave them."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Figure:
    """What one run measured of one aim.

    Attributes:
        name: of the aim, see `aims`.
        floor: what the hardware of the same run would allow, in the same unit; None where that
            was not measured.
        note: what else is worth saying, in a few words.
    """

    name: str
    measured: float
    unit: str
    floor: float | None = None
    note: str = ""


class FigureFile:
    """A file of figures, each a JSON object on a line of its own, so that a program that fails
    leaves those that it had.

    Args:
        path: None writes nothing.
    """

    def __init__(self, path: Path | None = None) -> None:
        self._path = path

    @classmethod
    def empty(cls, path: Path) -> FigureFile:
        """Returns a file that is there and holds nothing.

        Raises:
            OSError: it cannot be written.
        """
        path.write_text("", encoding="utf-8")
        return cls(path)

    def add(self, figures: Iterable[Figure]) -> None:
        """Appends figures as soon as they are known."""
        for figure in figures:
            if self._path is not None:
                with self._path.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(asdict(figure), ensure_ascii=False) + "\n")


def read_figures(path: Path) -> list[Figure]:
    """Returns the figures of a file, none where a program wrote none."""
    if not path.exists():
        return []
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    # A program that was killed may have left half a line.
    return [Figure(**json.loads(line)) for line in lines if line.endswith("\n")]


def add_figures_flag(parser: argparse.ArgumentParser) -> None:
    """Adds `--figures`, which parses to a `FigureFile`."""
    parser.add_argument(
        "--figures",
        type=_figure_file,
        default=FigureFile(),
        metavar="FILE",
        help="write what `make bench` gathers to this file: JSON, a figure a line",
    )


def _figure_file(text: str) -> FigureFile:
    try:
        return FigureFile.empty(Path(text))
    except OSError as error:
        raise argparse.ArgumentTypeError(f"cannot write {text}: {error.strerror}") from None
