"""Percentiles and plain-text tables."""

from __future__ import annotations

import math
from collections.abc import Sequence


def percentile(values: Sequence[float], percent: float) -> float:
    """Returns the smallest value that `percent` of the values do not exceed (nearest rank).

    Args:
        values: at least one, in any order.
        percent: in (0, 100].
    """
    assert values, "a percentile of nothing"
    rank = math.ceil(percent / 100 * len(values))
    return sorted(values)[max(rank, 1) - 1]


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Returns the rows below the header, columns right-aligned but for the first."""
    lines = [header, *rows]
    widths = [max(len(line[column]) for line in lines) for column in range(len(header))]

    def text(line: Sequence[str]) -> str:
        first, *others = line
        cells = [cell.rjust(width) for cell, width in zip(others, widths[1:], strict=True)]
        return "  ".join([first.ljust(widths[0]), *cells])

    return "\n".join(text(line) for line in lines)
