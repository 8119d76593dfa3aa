"""Runs one kind of request at rising load, in a closed or an open loop."""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.load.arrivals import Arrivals, arrivals_named
from tests.load.figures import table
from tests.load.picture import draw_sweep
from tests.load.timings import Objective, Point, Timing, knee, write_raw

Elapsed = Callable[[], float]
Send = Callable[[int, Timing, Elapsed], Awaitable[None]]
"""Sends request number i, and notes its tokens and errors as they come, by the clock given."""

_SHOWN = (
    *("load", "requests", "errors", "requests_per_s", "tokens_per_s", "goodput_per_s"),
    *("ttft_ms_p50", "ttft_ms_p99", "itl_ms_p50", "itl_ms_p99", "e2e_ms_p50", "e2e_ms_p99"),
)


@dataclass(frozen=True, slots=True)
class SweepSettings:
    """What to sweep.

    Attributes:
        loads: requests in flight, or requests a second when `arrivals` names a pattern.
        num_requests: at each load.
        out: folder of raw times, summary and picture.
    """

    loads: tuple[float, ...]
    num_requests: int
    arrivals: str | None
    objective: Objective
    out: Path


def add_sweep_flags(parser: argparse.ArgumentParser, *, loads: str, first_ms: float) -> None:
    """Adds the flags that every sweep has."""
    parser.add_argument(
        "--loads", default=loads, help="requests in flight, or a second with --arrivals"
    )
    parser.add_argument("--arrivals", help="open loop: poisson, burst or steady")
    parser.add_argument("--requests", type=int, default=64, help="at each load")
    parser.add_argument("--slo-first-ms", type=float, default=first_ms, help="first token within")
    parser.add_argument("--slo-gap-ms", type=float, default=100.0, help="mean gap of a request")
    parser.add_argument("--out", type=Path, default=Path(".run/load"))


def sweep_settings(flags: argparse.Namespace) -> SweepSettings:
    if flags.arrivals is not None:
        arrivals_named(flags.arrivals, 1.0)  # refuses a name before anything is sent
    return SweepSettings(
        loads=tuple(float(each) for each in flags.loads.split(",")),
        num_requests=flags.requests,
        arrivals=flags.arrivals,
        objective=Objective(flags.slo_first_ms / 1e3, flags.slo_gap_ms / 1e3),
        out=flags.out,
    )


async def closed_loop(send: Send, *, num_in_flight: int, num_requests: int) -> Point:
    """Keeps `num_in_flight` requests open until all are done."""
    numbers = iter(range(num_requests))
    timings: list[Timing] = []
    started_s = time.perf_counter()

    def elapsed() -> float:
        return time.perf_counter() - started_s

    async def work() -> None:
        for number in numbers:  # shared by all workers: each takes the next
            timing = Timing(due_s=elapsed())
            timings.append(timing)
            await send(number, timing, elapsed)

    async with asyncio.TaskGroup() as group:
        for _ in range(num_in_flight):
            group.create_task(work())
    return Point(num_in_flight, tuple(timings), elapsed())


async def open_loop(send: Send, arrivals: Arrivals, *, load: float, num_requests: int) -> Point:
    """Sends each request when it is due, whatever became of those before. A request is timed from
    then, so that a sender that falls behind does not hide the wait."""
    timings: list[Timing] = []
    started_s = time.perf_counter()

    def elapsed() -> float:
        return time.perf_counter() - started_s

    async with asyncio.TaskGroup() as group:
        for number, due_s in zip(range(num_requests), arrivals.offsets_s(), strict=False):
            await asyncio.sleep(due_s - elapsed())
            timing = Timing(due_s=due_s)
            timings.append(timing)
            group.create_task(send(number, timing, elapsed))  # type: ignore[arg-type]
    return Point(load, tuple(timings), elapsed())


async def sweep(send: Send, settings: SweepSettings) -> list[Point]:
    """Runs every load, lowest first."""
    points = []
    for load in sorted(settings.loads):
        if settings.arrivals is None:
            point = await closed_loop(
                send, num_in_flight=int(load), num_requests=settings.num_requests
            )
        else:
            arrivals = arrivals_named(settings.arrivals, load)
            point = await open_loop(send, arrivals, load=load, num_requests=settings.num_requests)
        points.append(point)
    return points


def report(name: str, points: Sequence[Point], settings: SweepSettings) -> str:
    """Writes raw times, summary and picture; returns the text for the terminal."""
    summaries = [point.summary(settings.objective) for point in points]
    write_raw(settings.out / f"{name}.jsonl", points)
    (settings.out / f"{name}.json").write_text(json.dumps(summaries, indent=2) + "\n")
    best = knee(points)
    unit = "in flight" if settings.arrivals is None else f"a second ({settings.arrivals})"
    draw_sweep(settings.out / f"{name}.png", summaries, knee_load=best.load, unit=unit)
    rows = [[_shown(each[column]) for column in _SHOWN] for each in summaries]
    errors = sorted({t.error for point in points for t in point.timings if t.error is not None})
    objective = settings.objective
    lines = [
        table(_SHOWN, rows),
        f"knee: {best.load:g} requests {unit} (most requests a second over mean time)",
        f"goodput: first token within {objective.first_s * 1e3:g} ms, mean gap within "
        f"{objective.gap_s * 1e3:g} ms",
        f"raw times, summary, picture: {settings.out}/{name}.{{jsonl,json,png}}",
        *(f"error: {error}" for error in errors[:5]),
    ]
    return "\n".join(lines)


def _shown(figure: float | None) -> str:
    return "-" if figure is None else f"{figure:g}"
