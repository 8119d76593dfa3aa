"""`make bench` runs what the host's GPUs can, and goes on where a part of it fails."""

from __future__ import annotations

import importlib.util
import subprocess
import sys

import pytest
import torch

from tests.bench import __main__ as serving
from tests.bench import choose


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Programs that were started; the second one fails."""
    names: list[str] = []

    def run(words: list[str], *, check: bool) -> subprocess.CompletedProcess[bytes]:
        names.append(words[-1])
        return subprocess.CompletedProcess(words, 3 if len(names) == 2 else 0)

    monkeypatch.setattr(subprocess, "run", run)
    return names


@pytest.mark.parametrize(("num_gpus", "last"), [(1, "engine_gpu"), (2, "tensor_parallel")])
def test_gpus_run_every_bench(
    num_gpus: int, last: str, started: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["bench"])
    monkeypatch.setattr(torch.cuda, "device_count", lambda: num_gpus)
    assert choose.main() == 3
    assert started[-1] == f"tests.bench.{last}"
    assert len(started) == 2 + num_gpus
    assert all(importlib.util.find_spec(name) for name in started)


@pytest.mark.parametrize(("num_gpus", "flags"), [(0, ()), (1, ("--repeats", "1"))])
def test_flags_and_hosts_without_a_gpu_take_the_serving_path(
    num_gpus: int, flags: tuple[str, ...], started: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["bench", *flags])
    monkeypatch.setattr(torch.cuda, "device_count", lambda: num_gpus)
    monkeypatch.setattr(serving, "main", lambda: 7)
    assert choose.main() == 7
    assert not started
