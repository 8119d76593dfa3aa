"""Pictures of measurements."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path


def draw_sweep(
    path: Path, summaries: Sequence[Mapping[str, float | None]], *, knee_load: float, unit: str
) -> None:
    """Draws throughput and goodput, time to the first token, and gaps over load."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    loads = [each["load"] for each in summaries]
    figure, axes = pyplot.subplots(1, 3, figsize=(12, 3.6), layout="constrained")
    rates, first, gaps = axes
    rates.plot(loads, [each["requests_per_s"] for each in summaries], "o-", label="answered")
    rates.plot(loads, [each["goodput_per_s"] for each in summaries], "s--", label="goodput")
    rates.set_title("requests a second")
    for axis, name, title in ((first, "ttft_ms", "first token, ms"), (gaps, "itl_ms", "gap, ms")):
        for percent, line in ((50, "o-"), (99, "s--")):
            values = [each[f"{name}_p{percent}"] for each in summaries]
            if None not in values:  # a tree has no gaps
                axis.plot(loads, values, line, label=f"p{percent}")
        axis.set_title(title)
    for axis in axes:
        axis.axvline(knee_load, color="grey", linewidth=0.8, label="knee")
        axis.set_xlabel(f"requests {unit}")
        axis.set_ylim(bottom=0)
        axis.legend(fontsize="small")
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
