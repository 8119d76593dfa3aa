"""The parts of a start, from the target's own log, and a table of them."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from shared.telemetry.start_up import MESSAGE, SERVING
from tests.bench.aims import figure
from tests.bench.figure import Figure
from tests.load.figures import table

FIRST_TOKEN = "start to first token"


@dataclass(frozen=True, slots=True)
class Part:
    """A part of a start; bytes where moving them is its work."""

    seconds: float
    size_bytes: int | None = None


Start = Mapping[str, Part]


def told(log: str) -> dict[str, Part]:
    """Returns the parts that the target's own process logged, in their order, the total last."""
    parts: dict[str, Part] = {}
    for line in log.splitlines():
        if not line.startswith("{"):
            continue
        record = json.loads(line)
        if record.get("message") == MESSAGE and record.get("service") == "target":
            parts[record["phase"]] = Part(record["seconds"], record.get("size_bytes"))
    # A part of a part is in it already.
    others = sum(
        part.seconds for name, part in parts.items() if name != SERVING and "/" not in name
    )
    if SERVING in parts:
        total = parts.pop(SERVING)
        parts["between them"] = Part(total.seconds - others)
        parts[SERVING] = total
    return parts


def first_token_figure(starts: Sequence[Start]) -> Figure:
    """Returns the median of the starts behind the first one, or what there is."""
    seconds = [start[FIRST_TOKEN].seconds for start in starts]
    note = f"first start {seconds[0]:.1f} s"
    return figure("start to the first token", statistics.median(seconds[1:] or seconds), note=note)


def report(starts: Sequence[Start]) -> str:
    """Returns the table: a row a part, the first start beside the median of the others."""
    rows = []
    for name, first in starts[0].items():
        later = [start[name].seconds for start in starts[1:] if name in start]
        median = statistics.median(later) if later else None
        rows.append(
            (
                name,
                f"{first.seconds:.3f}",
                "-" if median is None else f"{median:.3f}",
                "-" if median is None else f"{min(later):.3f} to {max(later):.3f}",
                "-" if first.size_bytes is None else f"{first.size_bytes / 1e9:.2f}",
                _speed(first, first.seconds if median is None else median),
            )
        )
    header = ("part", "first start, s", "median, s", "all, s", "GB", "GB/s")
    return table(header, rows)


def _speed(part: Part, seconds: float) -> str:
    if part.size_bytes is None or seconds == 0.0:
        return "-"
    return f"{part.size_bytes / 1e9 / seconds:.1f}"
