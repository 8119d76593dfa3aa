"""A signal ends a process that starts at once, and asks one that serves to stop."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

WAIT_S = 30.0
STARTING = """
from threading import Event
from shared.signals import end_at_signals
end_at_signals()
print("starting", flush=True)
Event().wait()
"""
SERVING = """
import asyncio
from shared.signals import end_at_signals, stop_event
async def serve():
    stop = stop_event()
    print("serving", flush=True)
    await stop.wait()
    print("drained", flush=True)
end_at_signals()
asyncio.run(serve())
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize(
    ("program", "last", "exit_code"), [(STARTING, "", 128), (SERVING, "drained\n", 0)]
)
def test_a_signal_drains_only_a_process_that_serves(
    program: str, last: str, exit_code: int, number: signal.Signals
) -> None:
    command = [sys.executable, "-c", program]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        process.send_signal(number)
        printed, errors = process.communicate(timeout=WAIT_S)
    assert (printed, errors) == (last, "")
    assert process.returncode == (exit_code + number if exit_code else 0)
