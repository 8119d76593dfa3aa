"""`make bench` runs what the host's GPUs can, goes on where a part of it fails, and says so."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import signal
import sys
from pathlib import Path

import pytest
import torch

from services.target.settings import DEMO_MODEL
from tests.bench import __main__ as serving
from tests.bench import choose
from tests.bench.aims import figure
from tests.bench.choose import PROGRAMS, Gathered
from tests.bench.figure import FigureFile
from tests.bench.program import Program, Stop
from tests.helpers.checkpoints import TinyShape, write_checkpoint

PLAIN = figure("plain decode, batch 1", 241.0, 256.0)


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Programs that were started; the third one fails, but for its first figure."""
    names: list[str] = []

    async def run(self: Stop, words: list[str]) -> int:
        names.append(words[2])
        if len(names) == 3:
            FigureFile(Path(words[-1])).add([PLAIN])
        return -9 if len(names) == 3 else 0

    monkeypatch.setattr(Stop, "run", run)
    return names


@pytest.mark.parametrize("num_gpus", [1, 2])
def test_gpus_run_every_bench_and_end_with_the_aims(
    num_gpus: int,
    started: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "argv", ["bench"])
    monkeypatch.setattr(torch.cuda, "device_count", lambda: num_gpus)
    assert choose.main() == -9
    assert started == [f"tests.bench.{each.name}" for each in PROGRAMS if each.num_gpus <= num_gpus]
    assert all(importlib.util.find_spec(name) for name in started)
    table = capsys.readouterr().out
    # What the program had measured before it failed counts.
    assert "| yes, 1.046 |" in table
    assert table.count("not measured: engine_gpu was ended by SIGKILL") == 1
    few = "tensor_parallel needs 2 GPUs, and the host has 1"
    none = "tensor_parallel did not measure it"
    assert f"not measured: {few if num_gpus == 1 else none} |" in table
    assert "not measured: gpu did not measure it" in table


@pytest.mark.parametrize(("num_gpus", "flags"), [(0, ()), (1, ("--repeats", "1"))])
def test_flags_and_hosts_without_a_gpu_take_the_serving_path(
    num_gpus: int, flags: tuple[str, ...], started: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["bench", *flags])
    monkeypatch.setattr(torch.cuda, "device_count", lambda: num_gpus)
    monkeypatch.setattr(serving, "main", lambda: 7)
    assert choose.main() == 7
    assert not started


async def test_programs_hand_over_their_figures_or_their_status(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, "llama", TinyShape(vocab_size=32), seed=3)
    target = f"--device cpu --max-total-tokens 512 --tokenizer-path {DEMO_MODEL}"
    start = ("--model", str(tmp_path), "--repeats", "0", "--target-flags", target)
    gathered = Gathered(1, Stop(), tmp_path)
    await gathered.run(Program("start", start))
    await gathered.run(Program("nothing"))
    assert gathered.exit_codes == {"start": 0, "nothing": 1}
    assert [each.name for each in gathered.figures] == ["start to the first token"]
    assert gathered.why_not("nothing") == "nothing ended with status 1, see above"
    assert gathered.exit_code == 1


WAITS = """
import os, pathlib, signal, sys
child = os.fork()
if child == 0:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    while True:
        signal.pause()
from tests.bench.aims import figure
from tests.bench.figure import FigureFile
from tests.bench.program import Program, Stop
FigureFile(pathlib.Path(sys.argv[1])).add([figure("prefill of 8 × 2,048 tokens", 402.0, 303.0)])
pathlib.Path(sys.argv[1]).open("a").write('{"name": "half a')
pathlib.Path(sys.argv[2]).write_text(str(child))
signal.pause()
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_signal_ends_the_program_and_leaves_the_table(
    number: signal.Signals,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    told = tmp_path / "child"

    def command(program: Program, figures: Path, folder: Path) -> list[str]:
        words = (WAITS, str(figures), str(told)) if program.name == "gpu" else ("",)
        return [sys.executable, "-c", *words]

    monkeypatch.setattr(Program, "command", command)
    monkeypatch.setattr("tests.bench.program._GRACE_S", 0.1)
    running = asyncio.ensure_future(choose.run_all(1))
    while not (told.exists() and told.read_text()):
        await asyncio.sleep(0.01)
    os.kill(os.getpid(), number)
    assert await running == 128 + number
    table = capsys.readouterr().out
    # What it had measured counts, and every other row says why it is missing.
    assert "402 ms" in table
    stopped = f"`make bench` was ended by {number.name}"
    assert f"not measured: gpu: {stopped} while it ran" in table
    assert f"not measured: start: {stopped} before it ran" in table
    assert "not measured: wide did not measure it" in table
    assert "== gpu took" in table
    assert "== engine_gpu" not in table
    # What the program had started, which does not heed the signal, ends as well.
    while _is_alive(told.read_text()):
        await asyncio.sleep(0.01)


def _is_alive(process_id: str) -> bool:
    try:
        status = Path(f"/proc/{process_id}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return "State:\tZ" not in status  # dead, and not reaped


def test_every_program_knows_what_it_is_run_with(tmp_path: Path) -> None:
    for program in PROGRAMS:
        command = program.command(tmp_path / "figures", tmp_path / "scratch")
        assert command[-2:] == ["--figures", str(tmp_path / "figures")]
        assert (str(tmp_path / "scratch") in command) == (program.fills is not None)
