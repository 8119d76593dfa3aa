"""What one request took, token by token, and the figures of many."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tests.load.figures import percentile


@dataclass(slots=True)
class Timing:
    """One request. Times are seconds since the start of its point of the sweep.

    Attributes:
        due_s: when it should be sent: in an open loop it may be late, and that counts.
        token_s: arrival of each message that carried tokens.
        num_tokens: tokens of each of these messages.
        error: why it failed; None when it did not.
    """

    due_s: float
    token_s: list[float] = field(default_factory=list)
    num_tokens: list[int] = field(default_factory=list)
    error: str | None = None

    @property
    def first_s(self) -> float:
        """Time to the first token."""
        return self.token_s[0] - self.due_s

    @property
    def last_s(self) -> float:
        return self.token_s[-1] - self.due_s

    @property
    def gaps_s(self) -> list[float]:
        """Gap before each token but the first message's: a message's tokens share its gap."""
        pairs = zip(self.token_s, self.token_s[1:], self.num_tokens[1:], strict=False)
        return [(after - before) / count for before, after, count in pairs for _ in range(count)]


@dataclass(frozen=True, slots=True)
class Objective:
    """What a request must keep to be worth something, in seconds.

    Attributes:
        first_s: longest time to the first token.
        gap_s: longest mean gap between tokens.
    """

    first_s: float
    gap_s: float

    def is_met(self, timing: Timing) -> bool:
        if timing.error is not None or timing.first_s > self.first_s:
            return False
        gaps = timing.gaps_s
        return not gaps or sum(gaps) / len(gaps) <= self.gap_s


@dataclass(frozen=True, slots=True)
class Point:
    """All requests of one load.

    Attributes:
        load: requests in flight (closed loop) or requests a second (open loop).
        duration_s: from the first request due to the last answer.
    """

    load: float
    timings: tuple[Timing, ...]
    duration_s: float

    @property
    def good(self) -> tuple[Timing, ...]:
        return tuple(each for each in self.timings if each.error is None)

    def summary(self, objective: Objective) -> dict[str, float | None]:
        """Returns the figures by name; times in milliseconds, None where there are none."""
        good = self.good
        gaps = [gap for each in good for gap in each.gaps_s]
        num_met = sum(objective.is_met(each) for each in self.timings)
        figures: dict[str, float | None] = {
            "load": self.load,
            "requests": len(self.timings),
            "errors": len(self.timings) - len(good),
            "requests_per_s": len(good) / self.duration_s,
            "tokens_per_s": sum(sum(each.num_tokens) for each in good) / self.duration_s,
            "goodput_per_s": num_met / self.duration_s,
        }
        series = {
            "ttft_ms": [each.first_s for each in good],
            "itl_ms": gaps,
            "e2e_ms": [each.last_s for each in good],
        }
        for name, values in series.items():
            for percent in (50, 99):
                figure = 1000 * percentile(values, percent) if values else None
                figures[f"{name}_p{percent}"] = figure
        return {name: v if v is None else round(v, 3) for name, v in figures.items()}


def knee(points: Sequence[Point]) -> Point:
    """Returns the load with the most power: requests a second over mean time of a request.

    Below it the system idles, above it requests mostly wait for each other.

    Source: Kleinrock 1979, "Power and Deterministic Rules of Thumb for Probabilistic Problems in
    Computer Communications".
    """

    def power(point: Point) -> float:
        good = point.good
        if not good:
            return 0.0
        mean_s = sum(each.last_s for each in good) / len(good)
        return len(good) / point.duration_s / mean_s

    return max(points, key=power)


def write_raw(path: Path, points: Sequence[Point]) -> None:
    """Writes a line of JSON for each request: its load, due time, token times and error."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        for point in points:
            for timing in point.timings:
                line: dict[str, Any] = {"load": point.load, **asdict(timing)}
                line["token_s"] = [round(each, 6) for each in timing.token_s]
                file.write(json.dumps(line) + "\n")
