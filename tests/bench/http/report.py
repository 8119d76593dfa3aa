"""The table of a run, in Markdown, and its rows in JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tests.bench.http.answers import Figures

HEADER = (
    *("mode", "load", "run", "tokens/s", "over plain", "first token p50, ms", "p99, ms"),
    *("ms a round", "tokens a round", "of a tree", "running", "prompt cached", "ms a step"),
    *("host, ms a step", "µs a lane", "client CPU", "failed", "note"),
)


@dataclass(frozen=True, slots=True)
class StepCost:
    """What the target's own counters say of a load, a step. None where it has no such counter.

    Attributes:
        step_ms: time of a step.
        host_ms: of it, that of the host: its own time if the target tells it, else the time that
            the device waited for it.
        lane_us: the same, a sequence of a step.
    """

    step_ms: float | None = None
    host_ms: float | None = None
    lane_us: float | None = None

    @classmethod
    def of(cls, before: Mapping[str, float], after: Mapping[str, float]) -> StepCost:
        """Reads the gains of counters."""

        def gain(name: str) -> float | None:
            full_name = f"outrider_target_{name}_total"
            return after[full_name] - before.get(full_name, 0.0) if full_name in after else None

        steps, lanes, busy_s = gain("steps"), gain("rounds"), gain("busy_seconds")
        host_s = gain("host_seconds")
        if host_s is None:
            host_s = gain("host_gap_seconds")
        return cls(
            step_ms=_ratio(busy_s, steps, 1e3),
            host_ms=_ratio(host_s, steps, 1e3),
            lane_us=_ratio(host_s, lanes, 1e6),
        )


def _ratio(part: float | None, whole: float | None, scale: float) -> float | None:
    return scale * part / whole if part is not None and whole else None


@dataclass(frozen=True, slots=True)
class Row:
    """One window of one load.

    Attributes:
        load: as it is called: `burst 64`, `32`, `open 60 %`.
        run: the place of the window in its load, from 1.
    """

    mode: str
    load: str
    run: int
    figures: Figures
    cost: StepCost
    busy: float
    note: str = ""

    def cells(self, plain: Figures | None) -> list[str]:
        """Returns the columns; `plain` is what the same load and run had without speculation."""
        figures, cost = self.figures, self.cost
        over = figures.tokens_per_s / plain.tokens_per_s if plain and plain.tokens_per_s else None
        return [
            *(self.mode, self.load, str(self.run), f"{figures.tokens_per_s:,.0f}"),
            _number(over, ".2f", " ×"),
            *(_number(figures.first_ms.get(percent), ".0f") for percent in (50, 99)),
            *(_number(figures.round_ms, ".2f"), _number(figures.tokens_per_round, ".2f")),
            _number(figures.verified_share, ".0%"),
            *(f"{figures.num_running:.1f}", _number(figures.cached_share, ".0%")),
            *(_number(cost.step_ms, ".2f"), _number(cost.host_ms, ".3f")),
            *(_number(cost.lane_us, ".1f"), f"{self.busy:.0%}", str(figures.num_failed)),
            self.note,
        ]


def _number(value: float | None, spec: str, unit: str = "") -> str:
    return "–" if value is None else f"{value:{spec}}{unit}"


def markdown(rows: Sequence[Row]) -> str:
    """Returns the table; "over plain" is filled where the run has the mode `plain`."""
    plain = {(row.load, row.run): row.figures for row in rows if row.mode == "plain"}
    lines: list[Sequence[str]] = [HEADER, ["---"] * len(HEADER)]
    lines += [row.cells(plain.get((row.load, row.run))) for row in rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
