"""Processes with torch: those that compute a part of a service's model, and a test's own."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from multiprocessing.context import ForkServerProcess
from pathlib import Path


def process_with_torch(target: Callable[..., None], *arguments: object) -> ForkServerProcess:
    """Returns a process to start, which has loaded torch within milliseconds, as followers have."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["services.followers"])
    return context.Process(target=target, args=arguments)


def follower_of(process_id: int) -> int:
    """Returns the one process of a target or a draft that computes beside it; it is a child of
    multiprocessing's fork server."""
    [server] = [
        child for child in _children(process_id)
        if b"multiprocessing.forkserver" in Path(f"/proc/{child}/cmdline").read_bytes()
    ]  # fmt: skip
    [follower] = _children(server)
    return follower


def _children(process_id: int) -> list[int]:
    threads = Path(f"/proc/{process_id}/task").iterdir()
    return [int(child) for thread in threads for child in (thread / "children").read_text().split()]
