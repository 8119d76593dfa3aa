"""A stack of services for the time of a benchmark."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
from collections.abc import AsyncIterator, Sequence

LAUNCHER, WIDE_LAUNCHER = "services.cli", "tests.bench.wide_serve"
"""Modules of `outrider`: the one that users start, and the one of `wide_serve`."""


class StackFailed(Exception):
    """The services did not start; their launcher has said why on stderr."""


@contextlib.asynccontextmanager
async def running_stack(
    arguments: Sequence[str], launcher: str = LAUNCHER
) -> AsyncIterator[asyncio.subprocess.Process]:
    """Runs `outrider serve` with these flags until the block ends; yields the launcher.

    Args:
        launcher: its module.

    Raises:
        StackFailed: the launcher ended before it said that it is ready.
    """
    command = (sys.executable, "-m", launcher, "serve", *arguments)
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    try:
        assert process.stdout is not None
        if not await process.stdout.readline():
            raise StackFailed(f"outrider serve ended with exit code {await process.wait()}")
        yield process
    finally:
        if process.returncode is None:
            process.send_signal(signal.SIGTERM)
        await process.wait()
