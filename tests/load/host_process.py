"""CPU time and memory of a process of this host, from /proc."""

from __future__ import annotations

import os
from pathlib import Path


def cpu_s(process_id: int) -> float:
    """Returns the seconds of CPU a process has used, its threads included."""
    # The name, in parentheses, may hold spaces.
    fields = Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def resident_mb(process_id: int) -> float:
    """Returns the memory a process holds, in MiB."""
    for line in Path(f"/proc/{process_id}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) / 1024
    raise ValueError(f"process {process_id} has no memory")
