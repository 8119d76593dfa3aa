"""Children that end with their parent."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from pathlib import Path

import pytest

from services.bound import end_with_parent

ROOT = Path(__file__).parents[2]

# Starts a stand-in and reads from standard input until it is killed.
PARENT = """
import subprocess, sys
subprocess.Popen([sys.executable, "-m", "services.bound", "tests.helpers.stand_in", *sys.argv[1:]])
sys.stdin.read()
"""

# Starts two processes by the fork server, and reads until it is killed.
STARTER = """
import sys
from services.followers import forked_process
from tests.services.test_bound import pause
processes = [forked_process(pause) for _ in range(2)]
for process in processes:
    process.start()
sys.stdin.read()
"""


def pause() -> None:
    end_with_parent()
    print(os.getpid(), flush=True)
    signal.pause()


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's part is Linux only")
async def test_a_child_gets_sigterm_when_its_parent_is_killed(tmp_path: Path) -> None:
    journal = tmp_path / "journal"
    journal.touch()
    parent = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", PARENT, "child", str(journal)),
        cwd=ROOT,
        stdin=asyncio.subprocess.PIPE,
    )
    while journal.read_text() != "child started\n":
        await asyncio.sleep(0.01)
    parent.send_signal(signal.SIGKILL)
    await parent.wait()
    while journal.read_text() != "child started\nchild stopped\n":
        await asyncio.sleep(0.01)


async def test_forked_processes_end_when_the_process_that_started_them_is_killed() -> None:
    """The fork server, their parent, does not: it lives as long as one of them."""
    starter = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", STARTER),
        cwd=ROOT,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    assert starter.stdout is not None
    process_ids = [int(await starter.stdout.readline()) for _ in range(2)]
    starter.send_signal(signal.SIGKILL)
    await starter.wait()
    for process_id in process_ids:
        with contextlib.suppress(ProcessLookupError):
            while True:
                os.kill(process_id, 0)
                await asyncio.sleep(0.01)
