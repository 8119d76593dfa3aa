"""`make serve` for real: three processes, one request, an orderly end."""

from __future__ import annotations

import json
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


def _free_ports(num_ports: int) -> list[int]:
    """Returns ports whose successor is free as well, for maintenance."""
    ports: list[int] = []
    while len(ports) < num_ports:
        with socket.create_server(("127.0.0.1", 0)) as first:
            port = int(first.getsockname()[1])
        try:
            socket.create_server(("127.0.0.1", port + 1)).close()
        except OSError:
            continue
        if not {port, port + 1} & {p + i for p in ports for i in (0, 1)}:
            ports.append(port)
    return ports


@contextmanager
def _serving(log_dir: Path, *flags: str) -> Iterator[tuple[subprocess.Popen[str], str, str]]:
    """Yields the launcher, its ready line and the base URL."""
    gateway, target, draft = _free_ports(3)
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


@pytest.mark.parametrize("flags", [(), ("--algorithm", "NONE")])
def test_the_stack_answers_and_ends_in_order(flags: tuple[str, ...], tmp_path: Path) -> None:
    with _serving(tmp_path, *flags) as (process, ready_line, base_url):
        assert ready_line.startswith(f"ready: {base_url}/v1")
        answer = _completion(base_url)
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=60)
    assert answer["choices"]
    assert process.returncode == 0
    assert errors == ""
