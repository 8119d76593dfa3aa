"""`make bench`: everything that one host's GPUs show, else the demo through the serving path.

On a GPU, each in a process of its own, since one would leave the next one too little memory, and
each with a table of its own: the engine with a trained pair at the size of an 8B (`wide`),
forwards, prefill and rounds beside their floors (`gpu`), plain decoding and what the host adds to
it (`engine_gpu`), products of few rows (`products`), with a second GPU the model on both
(`tensor_parallel`), and starts of a target (`start`). In the end one table of all aims.

Flags belong to the serving path, `python -m tests.bench`, so any of them chooses it.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

import torch

from tests.bench.aim_table import aim_table
from tests.bench.figure import Figure, read_figures


@dataclass(frozen=True, slots=True)
class Program:
    """One of `tests.bench`.

    Attributes:
        fills: flag that takes a folder for files of a model's size, if there is one.
    """

    name: str
    arguments: tuple[str, ...] = ()
    fills: str | None = None
    num_gpus: int = 1

    def command(self, figures: Path, folder: Path) -> list[str]:
        """Returns the words that start it."""
        fills = () if self.fills is None else (self.fills, str(folder))
        words = (*self.arguments, *fills, "--figures", str(figures))
        return [sys.executable, "-m", f"tests.bench.{self.name}", *words]


PROGRAMS = (
    Program("wide", ("--batches", "1", "8", "32", "64")),
    Program("gpu"),
    Program("engine_gpu"),
    Program("products"),
    Program("tensor_parallel", fills="--scratch", num_gpus=2),
    # Behind the others, so that the kernels that all of them need are compiled.
    Program("start", ("--algorithm", "EAGLE3", "--repeats", "1"), fills="--widen"),
)


@dataclass(slots=True)
class Gathered:
    """The figures of the programs so far, and how each of them ended."""

    num_gpus: int
    figures: list[Figure] = field(default_factory=list)
    exit_codes: dict[str, int] = field(default_factory=dict)

    def run(self, program: Program) -> None:
        """Runs a program, or leaves it out where there are too few GPUs for it."""
        if program.num_gpus > self.num_gpus:
            return
        print(f"== {program.name}", flush=True)
        start_s = time.monotonic()
        with tempfile.TemporaryDirectory(prefix="outrider-bench-") as scratch:
            file = Path(scratch) / "figures.jsonl"
            ended = subprocess.run(program.command(file, Path(scratch)), check=False)
            self.figures += read_figures(file)
        self.exit_codes[program.name] = ended.returncode
        print(f"== {program.name} took {time.monotonic() - start_s:.0f} s\n", flush=True)

    def why_not(self, name: str) -> str:
        """Says why a figure of a program is missing."""
        exit_code = self.exit_codes.get(name)
        if exit_code is None:
            needed = next(each.num_gpus for each in PROGRAMS if each.name == name)
            return f"{name} needs {needed} GPUs, and the host has {self.num_gpus}"
        if exit_code < 0:
            return f"{name} was ended by {signal.Signals(-exit_code).name}"
        if exit_code > 0:
            return f"{name} ended with status {exit_code}, see above"
        return f"{name} did not measure it"


def run_all(num_gpus: int) -> int:
    """Runs what so many GPUs can, prints the table, and returns the first exit status not 0."""
    gathered = Gathered(num_gpus)
    for program in PROGRAMS:
        # The others are worth having where one fails.
        gathered.run(program)
    print(aim_table(gathered.figures, gathered.why_not))
    return next((code for code in gathered.exit_codes.values() if code), 0)


def main() -> int:
    num_gpus = 0 if sys.argv[1:] else torch.cuda.device_count()
    if num_gpus:
        return run_all(num_gpus)
    from tests.bench import __main__ as serving

    return serving.main()


if __name__ == "__main__":
    sys.exit(main())
