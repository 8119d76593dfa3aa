"""The table of all aims: figure, floor, and how far it reaches."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

from tests.bench.aims import AIMS, Aim
from tests.bench.figure import Figure

_HEADER = ("figure", "measured", "floor", "of floor", "aim", "reached")
_NOTHING = "–"


def aim_table(figures: Iterable[Figure], why_not: Callable[[str], str]) -> str:
    """Returns a Markdown table with a row for every aim, and a line that counts them.

    Args:
        why_not: says of a program why a figure of it is missing.
    """
    found = {figure.name: figure for figure in figures}
    rows, num_reached, num_wanted = [], 0, 0
    for aim in AIMS.values():
        figure = found.get(aim.name)
        rows.append(_row(aim, figure) if figure else _missing(aim, why_not(aim.program)))
        ratio = aim.ratio(figure) if figure else None
        num_reached += ratio is not None and ratio >= 1.0
        num_wanted += str(aim) != _NOTHING
    num_missing = sum(name not in found for name in AIMS)
    count = f"{num_reached} of {num_wanted} aims reached, {num_missing} figures not measured"
    return f"{_markdown(rows)}\n\n{count}"


def _row(aim: Aim, figure: Figure) -> tuple[str, ...]:
    share = aim.share(figure)
    note = f" ({figure.note})" if figure.note else ""
    return (
        aim.name,
        f"{_number(figure.measured)} {aim.unit}{note}",
        _NOTHING if figure.floor is None else f"{_number(figure.floor)} {aim.unit}",
        _NOTHING if share is None else f"{share:.0%}",
        str(aim),
        _reached(aim.ratio(figure), str(aim)),
    )


def _missing(aim: Aim, reason: str) -> tuple[str, ...]:
    return (aim.name, _NOTHING, _NOTHING, _NOTHING, str(aim), f"not measured: {reason}")


def _reached(ratio: float | None, aim: str) -> str:
    if ratio is None:
        return _NOTHING if aim == _NOTHING else "not measured: no floor"
    verdict = "yes" if ratio >= 1.0 else "no"
    # Three digits, so that what is just missed does not look like reached.
    return verdict if math.isinf(ratio) else f"{verdict}, {ratio:.3f}"


def _number(value: float) -> str:
    digits = 0 if abs(value) >= 100.0 else 1 if abs(value) >= 10.0 else 2
    return f"{value:,.{digits}f}"


def _markdown(rows: list[tuple[str, ...]]) -> str:
    """Pads all columns but the last, whose reasons can be long."""
    lines = [_HEADER, *rows]
    widths = [max(len(line[column]) for line in lines) for column in range(len(_HEADER) - 1)]

    def text(cells: tuple[str, ...]) -> str:
        padded = [cell.ljust(width) for cell, width in zip(cells, widths, strict=False)]
        return "| " + " | ".join([*padded, cells[-1]]) + " |"

    rule = "|" + "|".join("-" * (width + 2) for width in (*widths, len(_HEADER[-1]))) + "|"
    return "\n".join([text(_HEADER), rule, *map(text, rows)])
