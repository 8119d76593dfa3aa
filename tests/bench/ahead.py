"""`make bench-async`: plain decoding, the best synchronous split and drafting ahead, in one run.

Target and draft are processes of their own, each on its own GPU where there are two; without CUDA
both run on the CPU, which shows that it works, not what it gains. Each of --temperatures with each
of --concurrency is a case, in which every mode is measured in turn: fixed ones, whose trees the
draft pushes, or with --adaptive what the target makes of a draft as `make serve` starts it.
Sections are printed as soon as they are there. --check-simulator and --turnaround belong to the
first case and come right behind it. --delay-ms and --hurt come at the end, for every case: with
drafts that share memory with the target, if they can, and that are as on another host.

With `--widen 8b` or `32b` the demo's models get the matrices of such a target and of a 1B draft, or
of the head that `--algorithm` names, while they are loaded; what they say stays the same (see
`tests.bench.widening`).
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from shared.errors import OutriderError
from tests.bench import ahead_report, delays, hurts, simulator_check, turnaround
from tests.bench.ahead_flags import cases_of, modes_of, parse, settings_of
from tests.bench.ahead_report import Compared
from tests.bench.chat_prompts import chat_prompts, questions
from tests.bench.hurts import (
    DISORDERED,
    FROZEN,
    KILLED,
    NARROW,
    SLOW,
    Hurt,
    HurtBench,
    HurtPass,
    unhurt,
)
from tests.bench.pair import Pair, PairFailed, PairSettings, running_pair
from tests.bench.passes import Case, Load, Mode, Pass, answer_all, measure, set_mode, warm_up
from tests.bench.recording import record
from tests.bench.round_svg import Rounds, picture
from tests.bench.scenario_file import write_scenarios
from tests.bench.session import RequestFailed
from tests.bench.widening import CannotWiden
from tests.bench.wire_process import WireProcess, running_wire

_TIMELINE_STEPS = 8


@dataclass(frozen=True, slots=True)
class AheadBench:
    """A running pair and what is asked of it.

    Attributes:
        started_s: by the clock of `time.perf_counter`.
    """

    pair: Pair
    settings: PairSettings
    flags: argparse.Namespace
    load: Load
    started_s: float

    async def run(self) -> None:
        """Prints every section."""
        self._say(f"target and draft are up; {len(self.load.prompts)} prompts")
        every: list[Compared] = []
        for case in cases_of(self.flags):
            repeats = await measure(
                self.pair, modes_of(self.flags), case, self.load, self.flags.repeats
            )
            compared = Compared(case, modes_of(self.flags), repeats)
            self._say(
                ahead_report.speeds(compared),
                ahead_report.account(compared),
                ahead_report.foreseen(compared, compared.best_ahead),
            )
            # At once: what a target learns in later cases is about these.
            if not every:
                await self._check_simulator(compared)
                await self._take_apart(compared)
            await self._draw(compared)
            every.append(compared)
        print(ahead_report.SPEED_NOTES)
        await self._hurt(every)

    async def _check_simulator(self, first: Compared) -> None:
        if not self.flags.check_simulator:
            return
        hop_ms = 1e3 * await self.pair.round_trip_s()
        points = simulator_check.points(first, hop_ms)
        self._say(f"round trip {hop_ms:.2f} ms", simulator_check.report(points))
        path: Path | None = self.flags.scenario
        if path is not None:
            used = simulator_check.measured(points, first.case)
            await asyncio.to_thread(write_scenarios, path, used)
            self._say(f"{path}: what the simulator was told, for tests.bench.simulate --check")

    async def _draw(self, compared: Compared) -> None:
        path: Path | None = self.flags.timeline
        if path is None:
            return
        mode = compared.best_ahead
        if len(cases_of(self.flags)) > 1:
            case = compared.case
            path = path.with_stem(f"{path.stem}-{case.temperature:g}-{case.concurrency}")
        drawn = picture(await self._recorded(mode, compared.case), _TIMELINE_STEPS)
        await asyncio.to_thread(path.write_text, drawn.svg, encoding="utf-8")
        self._say(f"{path}: {mode.name}, {drawn.title}")

    async def _take_apart(self, first: Compared) -> None:
        if self.flags.turnaround:
            mode = first.best_synchronous
            rounds = await self._recorded(mode, first.case)
            self._say(f"{mode.name}, from a verdict to the next step", turnaround.report(rounds))

    async def _recorded(self, mode: Mode, case: Case) -> Rounds:
        """Returns what both did for one answer."""
        one = Load(self.load.prompts, 1, self.load.num_tokens)
        await set_mode(self.pair, mode)

        async def answer() -> None:
            await answer_all(self.pair, mode, case, one)

        return await record(self.pair, self.settings, answer)

    async def _hurt(self, every: Sequence[Compared]) -> None:
        """Measures drafts that are hurt, and such as on another host: the first one is killed on
        the way."""
        passes: dict[Case, list[HurtPass]] = {each.case: [] for each in every}
        if self.flags.hurt:
            for compared in every:
                usual = compared.middle(compared.best_ahead)
                passes[compared.case].append(
                    unhurt("sharing memory, not hurt", usual, compared.case)
                )
                passes[compared.case].append(await self._hurt_by(FROZEN, compared, usual))
            for number, compared in enumerate(every):
                if number:
                    await self.pair.start_draft()
                usual = compared.middle(compared.best_ahead)
                passes[compared.case].append(await self._hurt_by(KILLED, compared, usual))
        if not self.flags.hurt and not self.flags.delay_ms:
            return
        log = self.settings.folder / "wire.log"
        async with running_wire(self.pair.target_address, log) as wire:
            await self.pair.start_draft(wire)
            self._say("a draft as on another host is up")
            for compared in every:
                if self.flags.delay_ms:
                    delayed = await delays.measure_delays(
                        *(self.pair, wire, compared, self.load),
                        *(self.flags.delay_ms, self.flags.repeats),
                    )
                    self._say(delays.report(compared, delayed))
                if self.flags.hurt:
                    found = passes[compared.case]
                    found += await self._hurt_at_a_distance(compared, wire)
                    self._say(hurts.report(compared.case, found, compared.plain))

    async def _hurt_at_a_distance(self, compared: Compared, wire: WireProcess) -> list[HurtPass]:
        mode, case = compared.best_ahead, compared.case
        await warm_up(self.pair, mode, case, self.load)
        usual = await answer_all(self.pair, mode, case, self.load)
        found = [unhurt("as on another host, not hurt", usual, case)]
        for hurt in (SLOW, DISORDERED, NARROW):
            found += [await self._hurt_by(hurt, compared, usual, wire)]
        return found

    async def _hurt_by(
        self, hurt: Hurt, compared: Compared, usual: Pass, wire: WireProcess | None = None
    ) -> HurtPass:
        bench = HurtBench(self.pair, wire, compared.best_ahead, compared.case, self.load, usual)
        return await bench.measure(hurt)

    def _say(self, *parts: str) -> None:
        """Prints parts of a section; a run that is stopped has them all the same."""
        elapsed_s = time.perf_counter() - self.started_s
        print(f"[{elapsed_s:.0f} s]", "\n\n".join(parts), end="\n\n", flush=True)


async def _run(flags: argparse.Namespace, folder: Path) -> None:
    started_s = time.perf_counter()
    settings = settings_of(flags, folder)
    count = max(flags.num_prompts, *flags.concurrency)
    prompts = await chat_prompts(settings.model, questions(count))
    load = Load(prompts, flags.num_prompts, flags.num_tokens)
    async with running_pair(settings) as pair:
        await AheadBench(pair, settings, flags, load, started_s).run()


def main() -> int:
    flags = parse(sys.argv[1:], __doc__)
    with tempfile.TemporaryDirectory(prefix="outrider-bench-async-") as name:
        try:
            asyncio.run(_run(flags, Path(name)))
        except (OutriderError, PairFailed, RequestFailed, CannotWiden, OSError) as error:
            print(f"bench-async: {error}", file=sys.stderr)
            for log in sorted(Path(name).glob("*.log")):
                print(f"{log.name}:\n{log.read_text()[-2000:]}", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
