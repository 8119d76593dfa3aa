"""Sums of small messages through memory that all GPUs of a group can read.

Each GPU writes its part into its own memory, and one kernel waits for the others, reads their parts
over NVLink and adds. A layer of a decode step needs two such sums of a few kilobytes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from shared.kernels.exchange import PeerAddresses, exchanged_sum

MAX_BYTES = 4 * 2**20
"""Largest message: 512 rows of 4,096 bfloat16. Prompts send more, and NCCL moves it faster."""
_FLAG_BYTES = 4


@dataclass(frozen=True, slots=True)
class PeerMemory:
    """A buffer on this GPU that the others of the group read, as this one reads theirs.

    Attributes:
        buffer: `[MAX_BYTES]` uint8, for one message at a time: all processes queue the same sums in
            the same order, on one stream each.
        addresses: of every process's buffer.
    """

    buffer: Tensor
    addresses: PeerAddresses

    def fits(self, part: Tensor) -> bool:
        """Whether `sum` can add such parts; the same answer on every rank."""
        return 0 < part.nbytes <= len(self.buffer)

    def sum(self, part: Tensor) -> Tensor:
        """Returns the sum of every process's `part`; see `exchanged_sum`."""
        return exchanged_sum(part, self.addresses)


def problem_with(device: torch.device, device_indices: list[int]) -> str | None:
    """Returns why the GPUs of a group cannot read each other's memory, or None.

    Args:
        device: of this process.
        device_indices: of all processes, this one's among them.
    """
    if device.type != "cuda":
        return f"{device} is no GPU"
    for index in device_indices:
        if index != device.index and not torch.cuda.can_device_access_peer(device, index):
            return f"{device} cannot read the memory of cuda:{index}"
    return None


def open_peer_memory(device: torch.device, rank: int, size: int, group_name: str) -> PeerMemory:
    """Allocates the buffer and exchanges it; all processes of the group call this together.

    A process can do so for one group in its life, because torch numbers what its processes
    exchange from their start on.

    Raises:
        RuntimeError: the driver or this torch cannot share memory.
    """
    try:
        from torch.distributed import _symmetric_memory as symmetric_memory
    except ImportError as error:
        raise RuntimeError(f"torch {torch.__version__} has no symmetric memory") from error
    with torch.cuda.device(device):
        buffer = symmetric_memory.empty(MAX_BYTES, dtype=torch.uint8, device=device)
        handle = symmetric_memory.rendezvous(buffer, group_name)  # type: ignore[arg-type]
        buffers = [
            handle.get_buffer(other, buffer.shape, torch.uint8).data_ptr() for other in range(size)
        ]
        addresses = PeerAddresses(
            rank,
            torch.tensor(buffers, dtype=torch.int64, device=device),
            torch.tensor(handle.signal_pad_ptrs, dtype=torch.int64, device=device),
            max_programs=handle.signal_pad_size // (size * _FLAG_BYTES),
        )
    return PeerMemory(buffer, addresses)
