"""Processes that share a model end when they are told to, and with an error when they fail."""

from __future__ import annotations

import multiprocessing
import signal
import subprocess
import sys
import time

import pytest

from services.followers import end_processes


def test_processes_that_do_not_end_are_killed(caplog: pytest.LogCaptureFixture) -> None:
    context = multiprocessing.get_context("spawn")
    ends = context.Process(target=int, name="target-1")
    hangs = context.Process(target=time.sleep, args=(3600.0,), name="target-2")
    ends.start()
    ends.join()
    hangs.start()
    end_processes([ends, hangs], 0.0)
    assert ends.exitcode == 0
    assert hangs.exitcode == -signal.SIGKILL
    assert [record.getMessage() for record in caplog.records] == [
        "target-2 does not end; it is killed"
    ]


def test_a_follower_that_fails_ends_with_an_error() -> None:
    code = "from services.followers import _run_follower; _run_follower(None, None, None)"
    ended = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False
    )
    assert ended.returncode == 1
    assert "cannot compute its part of the model" in ended.stderr
