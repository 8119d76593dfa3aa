"""Draws the loss curves of the two training logs.

``python -m shared.demo.recipe.plot target.jsonl draft.jsonl --out loss.png``
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path


def series(path: Path) -> tuple[list[float], list[float]]:
    """Millions of tokens seen and loss, one value a log row."""
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return [row["tokens"] / 1e6 for row in rows], [row["loss"] for row in rows]


def main() -> None:
    parser = argparse.ArgumentParser(description="Plot the loss of the demo trainings.")
    parser.add_argument("target", type=Path)
    parser.add_argument("draft", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(10, 4))
    titles = ("target: next-token loss (nats)", "draft: KL to the target + 0.2 CE (nats)")
    for axis, path, title in zip(axes, (args.target, args.draft), titles, strict=True):
        axis.plot(*series(path), linewidth=0.8)
        axis.set(title=title, xlabel="million tokens", yscale="log")
        axis.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(args.out, dpi=100)


if __name__ == "__main__":
    main()
