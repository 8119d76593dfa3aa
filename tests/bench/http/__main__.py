"""`make bench-http`: what a client gets, over HTTP, from a stack that `make serve` would start.

For each mode a fresh stack: a burst right after it is ready, and again; a closed loop at each
concurrency, in windows right after each other, so that the first shows what the second has learnt;
then open Poisson arrivals at shares of the closed loop's knee. Prompts are conversations that never
repeat, and every answer has the same length. Clients are processes of their own.

On a GPU the models are the demo's, widened to the sizes of an 8B (`tests.bench.widen`); on a CPU
the demo's own. `--serve "--max-running-requests 256"` adds flags of `outrider serve`.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import shlex
import signal
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Collection, Coroutine
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from shared.tokens import TreeShape
from tests.bench.http.answers import Figures, closed_rate, figures_of, knee
from tests.bench.http.load import ClientFailed, Load, Loaded, Traffic, clients
from tests.bench.http.report import Row, StepCost, markdown
from tests.bench.http.stack import MODES, Mode, Models, Stack, StackDied, serving
from tests.bench.stack import WIDE_LAUNCHER

_CLOSED = {True: (1, 8, 32, 64, 128, 256), False: (1, 4, 16)}
_TOKENS = {True: (512, 256), False: (128, 48)}  # of a prompt and of an answer
_BURST = {True: 64, False: 8}
_NUM_REPEATED = 8
_MOST_PROCESSES = 6
_MODELS = ("8b", "32b", "70b", "70b-with-8b", "70b-quarter", "trial", "demo")


@dataclass(frozen=True, slots=True)
class Plan:
    """What to measure.

    Attributes:
        window_s: of a closed loop's windows and an open loop's.
        num_windows: of each closed loop.
        open_percents: of the knee's requests a second.
        serve_flags: of `outrider serve`, beside a mode's.
        num_targets, num_drafts: behind one gateway; see `wide_serve`.
    """

    modes: tuple[Mode, ...]
    concurrencies: tuple[int, ...]
    window_s: float
    num_windows: int
    open_percents: tuple[int, ...]
    burst: int
    traffic: Traffic
    temperature: float
    num_processes: int
    log_dir: Path
    start_timeout_s: float
    serve_flags: tuple[str, ...] = ()
    num_targets: int = 1
    num_drafts: int = 1


@dataclass(slots=True)
class Bench:
    """Measures one mode after the other; rows are there as soon as they are known."""

    plan: Plan
    models: Models
    say: Callable[[str], None]
    rows: list[Row] = field(default_factory=list)

    async def run(self) -> None:
        """Measures all modes.

        Raises:
            StackDied: with the logs' last lines.
            ClientFailed: a process of clients did not do its part.
        """
        for mode in self.plan.modes:
            log_dir = self.plan.log_dir / mode.name
            self.say(f"{mode.name}: starting, logs in {log_dir}")
            timeout_s, temperature = self.plan.start_timeout_s, self.plan.temperature
            flags = [*mode.flags(self.models), *self.plan.serve_flags]
            launcher = self.models.launcher
            if self.plan.num_targets > 1 or self.plan.num_drafts > 1:
                flags += [f"--targets={self.plan.num_targets}", f"--drafts={self.plan.num_drafts}"]
                launcher = WIDE_LAUNCHER
            async with (
                clients(self.plan.num_processes) as processes,
                serving(flags, log_dir, temperature, timeout_s, launcher) as stack,
            ):
                load = Load(processes, stack.server, self.plan.traffic)
                await stack.watched(_ModeRun(self, mode, stack, load).run())

    def add(self, row: Row) -> None:
        self.rows.append(row)
        figures = row.figures
        first = ", ".join(f"p{percent} {ms:.0f} ms" for percent, ms in figures.first_ms.items())
        self.say(
            f"{row.mode}, {row.load}, run {row.run}: {figures.tokens_per_s:,.0f} tokens/s, "
            f"first token {first or '–'}, {figures.num_failed} failed {row.note}"
        )
        if figures.first_error is not None:
            self.say(f"first failure: {figures.first_error}")


@dataclass(slots=True)
class _ModeRun:
    """The loads of one mode on its stack."""

    bench: Bench
    mode: Mode
    stack: Stack
    load: Load
    points: list[tuple[float, Figures]] = field(default_factory=list)

    async def run(self) -> None:
        plan = self.bench.plan
        if plan.burst:
            note = f"ready in {self.stack.ready_s:.1f} s"
            for run in (1, 2):
                await self._measure(
                    f"burst {plan.burst}", self.load.burst(plan.burst), note, first_run=run
                )
                note = ""
        for concurrency in plan.concurrencies:
            closed = self.load.closed(concurrency, plan.num_windows, plan.window_s)
            last = await self._measure(str(concurrency), closed)
            self.points.append((concurrency, last))
        for percent in plan.open_percents:
            await self._open(percent)

    async def _open(self, percent: int) -> None:
        """The knee's rate is that of answers of full length."""
        plan, best = self.bench.plan, knee(self.points)
        num_tokens = plan.traffic.num_tokens
        rate = percent / 100 * best.tokens_per_s / num_tokens
        # Until as many answers end as begin.
        warm_s = min(best.num_running * num_tokens / max(best.tokens_per_s, 1e-9), 10.0)
        arrivals = self.load.open(rate, warm_s, plan.window_s)
        note = f"{rate:.2f} requests/s"
        await self._measure(f"open {percent} %", arrivals, note, is_open=True)

    async def _measure(
        self,
        name: str,
        work: Coroutine[Any, Any, Loaded],
        note: str = "",
        *,
        first_run: int = 1,
        is_open: bool = False,
    ) -> Figures:
        """Adds a row for each window of a load; returns the figures of the last."""
        before = await self.stack.counters()
        loaded = await work
        cost = StepCost.of(before, await self.stack.counters())
        found = [figures_of(loaded.answers, window) for window in loaded.windows]
        for run, figures in enumerate(found, start=first_run):
            said = self._beside_closed(note, figures) if is_open else note
            self.bench.add(Row(self.mode.name, name, run, figures, cost, loaded.busy, said))
        return found[-1]

    def _beside_closed(self, note: str, figures: Figures) -> str:
        """Adds how an open loop does beside the closed one with as many requests running."""
        closed = closed_rate(self.points, figures.num_running)
        if not closed:
            return note
        return f"{note}, {figures.tokens_per_s / closed:.2f} × closed at as many running"


async def run(plan: Plan, models: Models, out: Path | None) -> int:
    """Measures, prints the table of what there is, and returns the exit status."""
    start_s = time.monotonic()

    def say(text: str) -> None:
        print(f"{time.monotonic() - start_s:5.0f} s | {text}", file=sys.stderr, flush=True)

    bench, status = Bench(plan, models, say), 0
    task = asyncio.ensure_future(bench.run())
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, task.cancel)
    try:
        await task
    except (StackDied, ClientFailed) as error:
        say(str(error))
        status = 1
    except asyncio.CancelledError:
        status = 130
    print(markdown(bench.rows), flush=True)
    if out is not None:
        _write(out, plan, bench.rows)
    return status or int(any(row.figures.num_failed for row in bench.rows))


def _write(out: Path, plan: Plan, rows: list[Row]) -> None:
    out.parent.mkdir(parents=True, exist_ok=True)
    body = {"plan": asdict(plan), "rows": [asdict(row) for row in rows]}
    out.write_text(json.dumps(body, indent=1, default=str) + "\n", encoding="utf-8")


@contextlib.asynccontextmanager
async def widened_models(
    folder: Path | None, size: str, algorithms: Collection[str] = ()
) -> AsyncIterator[Models]:
    """Yields the models that algorithms take; wide ones are written where they are not, to a folder
    that goes with the block unless one is named.

    Args:
        size: of the target: one of `wide_sizes`, or `demo` for what is embedded. An 8B is written;
            larger ones are made as they are loaded.
        algorithms: those whose drafts are widened, too; `NONE` and `NGRAM` have none.
    """
    if size == "demo":
        yield Models()
        return
    # They import torch, which the demo on a CPU does without here.
    from services.draft.algorithm import Algorithm
    from services.draft.settings_problems import default_model_folder
    from services.target.settings import DEMO_MODEL
    from tests.bench.wide_folders import target_folder, widened, widened_draft
    from tests.bench.wide_loading import describe
    from tests.bench.wide_sizes import SIZES, write_draft

    drafters = [each for each in Algorithm if each.has_model and each.value in algorithms]
    drafts: dict[str, Path] = {}
    with contextlib.ExitStack() as stack:
        if folder is None:
            scratch = tempfile.TemporaryDirectory(prefix="outrider-bench-http-")
            folder = Path(stack.enter_context(scratch))
        start_s = time.monotonic()
        if size == "8b":
            for algorithm in drafters:
                source = default_model_folder(algorithm, DEMO_MODEL)
                work = (folder, algorithm, DEMO_MODEL, source)
                drafts[algorithm.value] = await asyncio.to_thread(widened_draft, *work)
            target = await asyncio.to_thread(widened, target_folder(folder), DEMO_MODEL, "8b")
            models = Models(target, drafts)
        else:
            sizes, folder = SIZES[size], folder / size
            model = describe(folder / "target", DEMO_MODEL, sizes.target)
            for algorithm in drafters:
                draft = drafts[algorithm.value] = folder / algorithm.value.lower()
                source = default_model_folder(algorithm, DEMO_MODEL)
                await asyncio.to_thread(write_draft, draft, sizes, model, algorithm, source)
            models = Models(folder / "target", drafts, WIDE_LAUNCHER)
        print(f"widened after {time.monotonic() - start_s:.0f} s", file=sys.stderr, flush=True)
        yield models


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(each) for each in text.split(",") if each)


def _modes(text: str) -> tuple[Mode, ...]:
    unknown = [name for name in text.split(",") if name not in MODES]
    if unknown:
        message = f"{', '.join(unknown)} is no mode; there are {', '.join(MODES)}"
        raise argparse.ArgumentTypeError(message)
    return tuple(MODES[name] for name in text.split(","))


def _shape(text: str) -> TreeShape:
    numbers = _numbers(text)
    if len(numbers) != 3:
        raise argparse.ArgumentTypeError(f"{text!r} is not STEPS,TOPK,TOKENS")
    return TreeShape(*numbers)


def parse(arguments: list[str], *, has_gpu: bool) -> argparse.Namespace:
    """Reads flags; defaults follow from the hardware."""
    parser = argparse.ArgumentParser(prog="bench-http", description=__doc__)
    add = parser.add_argument
    add("--modes", type=_modes, default=_modes("plain,eagle3"), help=", ".join(MODES))
    add("--shape", type=_shape, help="pins the trees of EAGLE-3: STEPS,TOPK,TOKENS")
    add("--concurrency", type=_numbers, default=_CLOSED[has_gpu], help="closed loops, by comma")
    add("--seconds", type=float, default=3.0, help="of each window")
    add("--runs", type=int, default=2, help="windows of a closed loop, right after each other")
    add("--open", type=_numbers, default=(30, 60, 90), help="percent of the knee; '' for none")
    add("--burst", type=int, default=_BURST[has_gpu], help="requests at once; 0 for none")
    add("--prompt-tokens", type=int, default=_TOKENS[has_gpu][0])
    add("--max-tokens", type=int, default=_TOKENS[has_gpu][1])
    add("--temperature", type=float, default=0.0)
    add("--repeated", action="store_true", help=f"{_NUM_REPEATED} prompts again and again")
    add("--fields", type=json.loads, default={}, metavar="JSON", help="more of requests' bodies")
    add("--fields-every", type=int, default=1, help="each so many requests have --fields")
    add("--processes", type=int, help="of clients; a third of the cores, at most 6")
    add("--model", choices=_MODELS, default="8b" if has_gpu else "demo")
    add("--widen", type=Path, metavar="DIR", help="keep the 8B there; unset, a folder in TMPDIR")
    add("--serve", type=shlex.split, default=[], metavar="FLAGS", help="of `outrider serve`")
    add("--targets", type=int, default=1, help="on a GPU each")
    add("--drafts", type=int, default=1, help="equal ones, on a GPU each after the targets'")
    add("--log-dir", type=Path, default=Path(".run/bench-http"))
    add("--out", type=Path, help="file for the rows in JSON")
    add("--start-timeout-s", type=float, default=300.0)
    add("--timeout-s", type=float, default=120.0, help="of one load's first tokens, and its last")
    return parser.parse_args(arguments)


def plan_of(flags: argparse.Namespace) -> Plan:
    """Returns what the flags ask for."""
    modes = flags.modes
    if flags.shape is not None:
        modes = tuple(
            replace(mode, shape=flags.shape) if mode.name.startswith("eagle3") else mode
            for mode in modes
        )
    num_processes = min(_MOST_PROCESSES, max(1, (os.cpu_count() or 1) // 3))
    return Plan(
        modes=modes,
        concurrencies=flags.concurrency,
        window_s=flags.seconds,
        num_windows=flags.runs,
        open_percents=flags.open if flags.concurrency else (),
        burst=flags.burst,
        traffic=Traffic(
            prompt_tokens=flags.prompt_tokens,
            num_tokens=flags.max_tokens,
            num_repeated=_NUM_REPEATED if flags.repeated else 0,
            fields=flags.fields,
            fields_every=flags.fields_every,
            timeout_s=flags.timeout_s,
        ),
        temperature=flags.temperature,
        num_processes=flags.processes or num_processes,
        log_dir=flags.log_dir,
        start_timeout_s=flags.start_timeout_s,
        serve_flags=tuple(flags.serve),
        num_targets=flags.targets,
        num_drafts=flags.drafts,
    )


async def _main(flags: argparse.Namespace) -> int:
    algorithms = {mode.algorithm for mode in flags.modes}
    async with widened_models(flags.widen, flags.model, algorithms) as models:
        return await run(plan_of(flags), models, flags.out)


def main() -> int:
    return asyncio.run(_main(parse(sys.argv[1:], has_gpu=_has_gpu())))


if __name__ == "__main__":
    sys.exit(main())
