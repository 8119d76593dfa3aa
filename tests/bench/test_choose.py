"""`make bench` runs what the host's GPUs can, goes on where a part of it fails, and says so."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from services.target.settings import DEMO_MODEL
from tests.bench import __main__ as serving
from tests.bench import choose
from tests.bench.aims import figure
from tests.bench.choose import PROGRAMS, Gathered, Program
from tests.bench.figure import FigureFile
from tests.helpers.checkpoints import TinyShape, write_checkpoint

PLAIN = figure("plain decode, batch 1", 241.0, 256.0)


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Programs that were started; the third one fails, but for its first figure."""
    names: list[str] = []

    def run(words: list[str], *, check: bool) -> subprocess.CompletedProcess[bytes]:
        names.append(words[2])
        if len(names) == 3:
            FigureFile(Path(words[-1])).add([PLAIN])
        return subprocess.CompletedProcess(words, -9 if len(names) == 3 else 0)

    monkeypatch.setattr(subprocess, "run", run)
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


def test_programs_hand_over_their_figures_or_their_status(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, "llama", TinyShape(vocab_size=32), seed=3)
    target = f"--device cpu --max-total-tokens 512 --tokenizer-path {DEMO_MODEL}"
    start = ("--model", str(tmp_path), "--repeats", "0", "--target-flags", target)
    gathered = Gathered(num_gpus=1)
    gathered.run(Program("start", start))
    gathered.run(Program("nothing"))
    assert gathered.exit_codes == {"start": 0, "nothing": 1}
    assert [each.name for each in gathered.figures] == ["start to the first token"]
    assert gathered.why_not("nothing") == "nothing ended with status 1, see above"


def test_every_program_knows_what_it_is_run_with(tmp_path: Path) -> None:
    for program in PROGRAMS:
        command = program.command(tmp_path / "figures", tmp_path / "scratch")
        assert command[-2:] == ["--figures", str(tmp_path / "figures")]
        assert (str(tmp_path / "scratch") in command) == (program.fills is not None)
