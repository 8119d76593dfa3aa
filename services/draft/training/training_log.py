"""Training log as JSON lines, and its plots."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from shared.errors import CheckpointError


@dataclass(frozen=True, slots=True)
class LogRow:
    """Means over the steps since the last row.

    Attributes:
        tokens: read by all processes since the beginning.
        seconds: since the beginning, interruptions left out.
        losses, agreements: by drafted position, see `Outcome`.
    """

    step: int
    tokens: int
    seconds: float
    rate_factor: float
    loss: float
    losses: tuple[float, ...]
    agreements: tuple[float, ...]
    accepted_length: float


class TrainingLog:
    """Appends to a file; rows after the step from which a run resumes are dropped first."""

    def __init__(self, path: Path, *, resume_step: int) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        kept = [row for row in read_log(path) if row.step <= resume_step] if path.exists() else []
        path.write_text("".join(_line(row) for row in kept), encoding="utf-8")
        self._path = path

    def write(self, row: LogRow) -> None:
        """Adds a row."""
        with self._path.open("a", encoding="utf-8") as file:
            file.write(_line(row))


def read_log(path: Path) -> list[LogRow]:
    """Raises: CheckpointError if the file cannot be read as a log."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
        return [_parsed(line) for line in lines]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path} is no training log: {error}") from error


def _parsed(line: str) -> LogRow:
    values = json.loads(line)
    return LogRow(
        **values | {key: tuple(values[key]) for key in ("losses", "agreements")},
    )


def _line(row: LogRow) -> str:
    return json.dumps({key: _rounded(value) for key, value in asdict(row).items()}) + "\n"


def _rounded(value: float | Sequence[float]) -> float | list[float]:
    if isinstance(value, Sequence):
        return [round(item, 5) for item in value]
    return round(value, 5)


# Plots of a training log: loss, agreement by position, acceptance length.


def draw_curves(rows: Sequence[LogRow], folder: Path, title: str) -> list[Path]:
    """Writes `loss.png` and `acceptance.png`; returns their paths.

    Raises:
        ImportError: matplotlib is not installed.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    folder.mkdir(parents=True, exist_ok=True)
    millions = [row.tokens / 1e6 for row in rows]
    paths = [folder / "loss.png", folder / "acceptance.png"]
    figures = [Figure(figsize=(6, 4), layout="constrained") for _ in paths]
    left, right = (figure.add_subplot() for figure in figures)
    left.plot(millions, [row.loss for row in rows], color="black", label="weighted mean")
    right.plot(
        millions, [row.accepted_length for row in rows], color="black", label="accepted length"
    )
    agreement = right.twinx()
    for position in range(len(rows[0].losses) if rows else 0):
        for axes, values in (
            (left, [row.losses[position] for row in rows]),
            (agreement, [row.agreements[position] for row in rows]),
        ):
            axes.plot(millions, values, label=f"position {position + 1}", linewidth=0.8, alpha=0.7)
    left.set(title=title, xlabel="million tokens", ylabel="loss", yscale="log")
    right.set(title=title, xlabel="million tokens", ylabel="accepted length with bonus")
    agreement.set(ylabel="agreement with the target, by position", ylim=(0, 1))
    left.legend(fontsize="small")
    agreement.legend(fontsize="small", loc="lower right")
    for figure, path in zip(figures, paths, strict=True):
        FigureCanvasAgg(figure)
        figure.savefig(path, dpi=100)
    return paths
