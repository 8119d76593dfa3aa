"""`make bench`: everything that one host's GPUs show, else the demo through the serving path.

On a GPU, each in a process of its own, since one would leave the next one too little memory, and
each with a table of its own: the engine with a trained pair at the size of an 8B (`wide`),
forwards, prefill and rounds beside their floors (`gpu`), plain decoding and what the host adds to
it (`engine_gpu`), products of few rows (`products`), with a second GPU the model on both
(`tensor_parallel`), and starts of a target (`start`). In the end one table of all aims.

Flags belong to the serving path, `python -m tests.bench`, so any of them chooses it.
"""

from __future__ import annotations

import asyncio
import signal
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

from tests.bench.aim_table import aim_table
from tests.bench.figure import Figure, read_figures
from tests.bench.program import Program, Stop

PROGRAMS = (
    Program("wide", ("--batches", "1", "8", "32", "64", "--aims-only"), fills="--scratch"),
    Program("gpu"),
    Program("engine_gpu"),
    Program("products"),
    Program("tensor_parallel", ("--batches", "1", "--plain"), fills="--widen", num_gpus=2),
    # Behind the others, so that the kernels that all of them need are compiled, and of the model
    # that two GPUs have read.
    Program("start", ("--algorithm", "EAGLE3", "--repeats", "1"), fills="--widen"),
)


@dataclass(slots=True)
class Gathered:
    """The figures of the programs so far, and how each of them ended.

    Attributes:
        folder: for their figures, and for files of a model's size, which they share.
        running: the program that runs, or ran when all was stopped.
    """

    num_gpus: int
    stop: Stop
    folder: Path
    figures: list[Figure] = field(default_factory=list)
    exit_codes: dict[str, int] = field(default_factory=dict)
    running: str | None = None

    async def run(self, program: Program) -> None:
        """Runs a program, or leaves it out where there are too few GPUs for it."""
        if program.num_gpus > self.num_gpus:
            return
        self.running = program.name
        print(f"== {program.name}", flush=True)
        start_s = time.monotonic()
        file = self.folder / f"{program.name}.jsonl"
        exit_code = await self.stop.run(program.command(file, self.folder))
        # A program adds each figure when it knows it, so one that was stopped has some, too.
        self.figures += read_figures(file)
        if self.stop.signal is None:
            self.exit_codes[program.name] = exit_code
        print(f"== {program.name} took {time.monotonic() - start_s:.0f} s\n", flush=True)

    @property
    def exit_code(self) -> int:
        """128 and the signal that stopped all, as shells have it, or the first status not 0."""
        if self.stop.signal is not None:
            return 128 + self.stop.signal
        return next((code for code in self.exit_codes.values() if code), 0)

    def why_not(self, name: str) -> str:
        """Says why a figure of a program is missing."""
        exit_code = self.exit_codes.get(name)
        if exit_code is None:
            return self._why_not_run(name)
        if exit_code < 0:
            return f"{name} was ended by {signal.Signals(-exit_code).name}"
        if exit_code > 0:
            return f"{name} ended with status {exit_code}, see above"
        return f"{name} did not measure it"

    def _why_not_run(self, name: str) -> str:
        needed = next(each.num_gpus for each in PROGRAMS if each.name == name)
        if needed > self.num_gpus:
            return f"{name} needs {needed} GPUs, and the host has {self.num_gpus}"
        assert self.stop.signal is not None, "nothing else leaves a program out"
        when = "while it ran" if name == self.running else "before it ran"
        return f"{name}: `make bench` was ended by {self.stop.signal.name} {when}"


async def run_all(num_gpus: int) -> int:
    """Runs what so many GPUs can, prints the table, and returns the exit status.

    A signal that asks to end stops the program that runs; the table shows what there is then.
    """
    with tempfile.TemporaryDirectory(prefix="outrider-bench-") as folder:
        gathered = Gathered(num_gpus, Stop(), Path(folder))
        for program in PROGRAMS:
            # The others are worth having where one fails.
            await gathered.run(program)
            if gathered.stop.signal is not None:
                break
        print(aim_table(gathered.figures, gathered.why_not), flush=True)
    return gathered.exit_code


def main() -> int:
    if not sys.argv[1:]:
        import torch  # which takes seconds

        if num_gpus := torch.cuda.device_count():
            return asyncio.run(run_all(num_gpus))
    from tests.bench import __main__ as serving

    return serving.main()


if __name__ == "__main__":
    sys.exit(main())
