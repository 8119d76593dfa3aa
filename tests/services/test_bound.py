"""Children that end with their parent."""

from __future__ import annotations

import asyncio
import signal
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

# Starts a stand-in and reads from standard input until it is killed.
PARENT = """
import subprocess, sys
subprocess.Popen([sys.executable, "-m", "services.bound", "tests.helpers.stand_in", *sys.argv[1:]])
sys.stdin.read()
"""


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
