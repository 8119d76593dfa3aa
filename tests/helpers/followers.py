"""The processes that a service spawned to compute a part of its model."""

from __future__ import annotations

from pathlib import Path


def follower_of(process_id: int) -> int:
    """Returns the one child of a target or a draft that multiprocessing spawned to compute."""
    threads = Path(f"/proc/{process_id}/task").iterdir()
    children = [child for thread in threads for child in (thread / "children").read_text().split()]
    [follower] = [
        int(child) for child in children
        if b"spawn_main" in Path(f"/proc/{child}/cmdline").read_bytes()
    ]  # fmt: skip
    return follower
