"""CPU time and memory of a process of this host, from /proc."""

from __future__ import annotations

import os
from pathlib import Path


def cpu_s(process_id: int) -> tuple[float, float]:
    """Returns the seconds of CPU that a process and the children it has now have used, threads
    included: in their own code, and in the kernel."""
    user_s = kernel_s = 0.0
    for each in (process_id, *_children(process_id)):
        # The name, in parentheses, may hold spaces.
        fields = Path(f"/proc/{each}/stat").read_text().rpartition(")")[2].split()
        user_s += int(fields[11]) / os.sysconf("SC_CLK_TCK")
        kernel_s += int(fields[12]) / os.sysconf("SC_CLK_TCK")
    return user_s, kernel_s


def _children(process_id: int) -> list[int]:
    tasks = Path(f"/proc/{process_id}/task").glob("*/children")
    return [int(child) for task in tasks for child in task.read_text().split()]


def resident_mb(process_id: int) -> float:
    """Returns the memory a process holds, in MiB."""
    for line in Path(f"/proc/{process_id}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) / 1024
    raise ValueError(f"process {process_id} has no memory")
