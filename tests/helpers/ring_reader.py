"""Another process that reads a feature ring."""

from __future__ import annotations

import subprocess
import sys

import torch

from shared.runtime.ring_memory import FeatureRingWriter

NUM_ROWS, WIDTH, DTYPE = 8, 3, torch.bfloat16

_READER = """
import sys, torch
from shared.runtime.ring_memory import FeatureRingReader
from shared.runtime.ring_memory import RingAddress
address = RingAddress(sys.argv[1], bytes.fromhex(sys.argv[2]))
ring = FeatureRingReader(address, 8, 3, torch.bfloat16, torch.device(sys.argv[3]))
print("open", flush=True)
for line in sys.stdin:
    start, count = map(int, line.split())
    print(ring.read(start, count).float().cpu().flatten().tolist(), ring.freed(), flush=True)
"""


def ring_rows(first: int, count: int) -> torch.Tensor:
    """Returns rows whose elements are numbered by their position."""
    elements = torch.arange(first * WIDTH, (first + count) * WIDTH)
    return elements.view(-1, WIDTH).to(DTYPE)


def read_elsewhere(ring: FeatureRingWriter, device: str) -> None:
    """Checks that a new process on `device` reads the written rows, and exits with 0."""
    address = ring.address
    arguments = [address.shared_file, address.cuda_ipc_handle.hex(), device]
    process = subprocess.Popen(
        [sys.executable, "-c", _READER, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stdout.readline() == "open\n"
        ring.free(0)
        for start, count in ((0, 5), (5, 3), (8, 6), (14, 5)):
            assert ring.write(ring_rows(start, count)) == start
            process.stdin.write(f"{start} {count}\n")
            process.stdin.flush()
            expected = ring_rows(start, count).float().flatten().tolist()
            freed = start + count
            assert process.stdout.readline() == f"{expected} {freed}\n"
            ring.free(freed)
        process.stdin.close()
        assert process.wait(30) == 0
