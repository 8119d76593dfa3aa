"""Plots of a training log: loss, agreement by position, acceptance length."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from services.draft.training.training_log import LogRow


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
