"""Sums of small messages through memory that all GPUs of a group can read.

NCCL takes some 25 us to gather the few kilobytes of a decode step, which a layer needs twice. Here
each GPU writes its part into its own memory, and one kernel waits for the others, reads their parts
over NVLink and adds.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

MAX_BYTES = 4 * 2**20
"""Largest message: 512 rows of 4,096 bfloat16. Prompts send more, and NCCL moves it faster."""
SIZES = (2, 4, 8)
"""Numbers of processes for which torch's kernel adds in the order of ranks, on every rank."""
# What its vector loads want; the count of elements decides, so that all ranks decide alike.
_ALIGNMENT = 16


@dataclass(frozen=True, slots=True)
class PeerMemory:
    """A buffer on this GPU that the others of the group read, as this one reads theirs.

    Attributes:
        buffer: `[MAX_BYTES]` uint8, for one message at a time: all processes queue the same sums in
            the same order, on one stream each.
        size: processes.
        group_name: of the process group, as torch's operations know it.
    """

    buffer: Tensor
    size: int
    group_name: str

    def fits(self, part: Tensor) -> bool:
        """Whether `sum` can add such parts; the same answer on every rank."""
        size_bytes = part.numel() * message_dtype(part.dtype, self.size).itemsize
        return 0 < size_bytes <= len(self.buffer) and size_bytes % _ALIGNMENT == 0

    def sum(self, part: Tensor) -> Tensor:
        """Returns the sum of every process's `part`, rounded once.

        The kernel adds in the order of ranks whatever the shape is, so a row's bits do not depend
        on the rows beside it. See `message_dtype` for the rounding.
        """
        dtype = message_dtype(part.dtype, self.size)
        size_bytes = part.numel() * dtype.itemsize
        message = self.buffer[:size_bytes].view(dtype).view(part.shape)
        # The variant that copies by itself signals before all of its threads have written.
        message.copy_(part)
        total: Tensor = torch.ops.symm_mem.one_shot_all_reduce(message, "sum", self.group_name)
        return total.to(part.dtype)


def message_dtype(dtype: torch.dtype, size: int) -> torch.dtype:
    """Returns what parts in `dtype` travel in, so that their sum is rounded once.

    The kernel rounds after each addition. For two processes that is once, and the sum of two
    bfloat16 rounded by way of float32 is the same: 24 bits are more than twice 8 and 2 (Figueroa,
    When is double rounding innocuous, 1995). More processes, and float16, which the kernel does
    not know, travel in float32.
    """
    return dtype if dtype is torch.bfloat16 and size == 2 else torch.float32


def problem_with(device: torch.device, device_indices: list[int]) -> str | None:
    """Returns why the GPUs of a group cannot read each other's memory, or None.

    Args:
        device: of this process.
        device_indices: of all processes, this one's among them.
    """
    size = len(device_indices)
    if device.type != "cuda":
        return f"{device} is no GPU"
    if size not in SIZES:
        return f"{size} processes are none of {', '.join(map(str, SIZES))}"
    for index in device_indices:
        if index != device.index and not torch.cuda.can_device_access_peer(device, index):
            return f"{device} cannot read the memory of cuda:{index}"
    return None


def open_peer_memory(device: torch.device, size: int, group_name: str) -> PeerMemory:
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
    if not hasattr(torch.ops.symm_mem, "one_shot_all_reduce"):
        raise RuntimeError(f"torch {torch.__version__} cannot add in symmetric memory")
    with torch.cuda.device(device):
        buffer = symmetric_memory.empty(MAX_BYTES, dtype=torch.uint8, device=device)
        symmetric_memory.rendezvous(buffer, group_name)  # type: ignore[arg-type]
    return PeerMemory(buffer, size, group_name)
