"""`make serve` for real: three processes, one request, an orderly end."""

from __future__ import annotations

import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def _free_ports() -> Iterator[int]:
    """Yields ports that are free together with their successor, which is for maintenance.

    They lie below the range that the kernel takes ephemeral ports from: a connection of another
    process must not take one before the service binds it.
    """
    for port in range(20_000 + os.getpid() % 5_000 * 2, 32_000, 2):
        if _is_free(port) and _is_free(port + 1):
            yield port


def _is_free(port: int) -> bool:
    try:
        socket.create_server(("127.0.0.1", port)).close()
    except OSError:
        return False
    return True


@contextmanager
def _serving(log_dir: Path, *flags: str) -> Iterator[tuple[subprocess.Popen[str], str, str]]:
    """Yields the launcher, its ready line and the base URL."""
    gateway, target, draft = itertools.islice(_free_ports(), 3)
    command = [sys.executable, "-m", "services.serve", "--log-dir", str(log_dir)]
    command += ["--gateway-port", str(gateway), "--target-port", str(target)]
    command += ["--draft-port", str(draft), *flags]
    process = subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        yield process, process.stdout.readline(), f"http://127.0.0.1:{gateway}"
    finally:
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=60)


def _completion(base_url: str) -> dict[str, object]:
    body = {
        "model": json.load(urllib.request.urlopen(f"{base_url}/v1/models"))["data"][0]["id"],
        "messages": [{"role": "user", "content": "What is the capital of France?"}],
        "temperature": 0,
        "max_tokens": 16,
    }
    request = urllib.request.Request(
        f"{base_url}/v1/chat/completions",
        data=json.dumps(body).encode(),
        headers={"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request) as response:
        answer: dict[str, object] = json.load(response)
    return answer


@pytest.mark.parametrize("flags", [(), ("--algorithm", "NONE"), ("--placement", "embedded")])
def test_the_stack_answers_and_ends_in_order(flags: tuple[str, ...], tmp_path: Path) -> None:
    with _serving(tmp_path, *flags) as (process, ready_line, base_url):
        assert ready_line.startswith(f"ready: {base_url}/v1"), process.communicate()[1]
        answer = _completion(base_url)
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=60)
    assert answer["choices"]
    assert process.returncode == 0
    assert errors == ""
