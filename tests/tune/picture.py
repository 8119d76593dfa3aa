"""A picture of a search: every setting that was tried, by concurrency."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.tune.__main__ import Trial


def draw_trials(path: Path, trials: Sequence[Trial]) -> None:
    """Draws tokens a second of each setting as bars, fastest on top, one panel a concurrency."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    concurrencies = sorted({trial.concurrency for trial in trials})
    most = max(sum(t.concurrency == c for t in trials) for c in concurrencies)
    figure, axes = pyplot.subplots(
        1,
        len(concurrencies),
        figsize=(5.5 * len(concurrencies), 1.2 + 0.22 * most),
        layout="constrained",
        squeeze=False,
    )
    for axis, concurrency in zip(axes[0], concurrencies, strict=True):
        shown = sorted(
            (trial for trial in trials if trial.concurrency == concurrency),
            key=lambda trial: trial.tokens_per_s,
        )
        names = [f"{trial.placement}: {trial.setting}" for trial in shown]
        colours = ["grey" if trial.setting == "plain" else "tab:blue" for trial in shown]
        axis.barh(names, [trial.tokens_per_s for trial in shown], color=colours)
        axis.set_title(f"{concurrency} at once")
        axis.set_xlabel("tokens a second")
        axis.tick_params(axis="y", labelsize="x-small")
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
