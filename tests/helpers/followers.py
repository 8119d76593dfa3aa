"""The processes that a service started to compute a part of its model."""

from __future__ import annotations

from pathlib import Path


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
