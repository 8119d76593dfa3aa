"""`outrider serve` as a child process, on free ports."""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).parents[2]
_BLOCK_SIZE = 40
EVERY_ROUND_HAS_A_TREE = {
    "OUTRIDER_TARGET_SPECULATIVE_ADAPTIVE": "false",
    "OUTRIDER_TARGET_CANDIDATE_WAIT_MS": "60000",
    "OUTRIDER_TARGET_CANDIDATE_WAIT_SEQUENCES": "256",
}
"""Settings of a target that always speculates: on a busy machine plain steps may be faster."""


def free_ports(count: int) -> Iterator[int]:
    """Yields ports that are free, together with their successors.

    The ports lie below the kernel's range of ephemeral ports, in a block that no other test process
    uses. So nothing else takes a port before the service binds it.

    Args:
        count: consecutive ports; a service takes two, the second for maintenance.
    """
    first = _own_block().getsockname()[1] + 1
    for port in range(first, first + _BLOCK_SIZE - count, count):
        if all(map(_is_free, range(port, port + count))):
            yield port


@functools.cache
def _own_block() -> socket.socket:
    """Reserves a block for this process: listens on its first port until the process ends."""
    for port in range(20_000, 32_000, _BLOCK_SIZE):
        with contextlib.suppress(OSError):
            block = socket.create_server(("127.0.0.1", port))
            atexit.register(block.close)
            return block
    raise AssertionError("every block of ports is taken")


@contextmanager
def serving(
    log_dir: Path, *flags: str, env: Mapping[str, str] | None = None
) -> Iterator[tuple[subprocess.Popen[str], str, str]]:
    """Yields the launcher, its ready line and the base URL.

    Args:
        env: environment variables in addition to this process's.
    """
    ports = free_ports(4)  # four ports serve two drafts
    gateway, target, draft = next(ports), next(ports), next(ports)
    command = [sys.executable, "-m", "services.cli", "serve", "--log-dir", str(log_dir)]
    command += ["--gateway-port", str(gateway), "--target-port", str(target)]
    command += ["--draft-port", str(draft), *flags]
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env={**os.environ, **(env or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        yield process, process.stdout.readline(), f"http://127.0.0.1:{gateway}"
    finally:
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=60)


def _is_free(port: int) -> bool:
    try:
        socket.create_server(("127.0.0.1", port)).close()
    except OSError:
        return False
    return True
