"""Sums of small messages through memory that all GPUs of a group can read and write.

A layer of a decode step needs two sums of a few kilobytes, each with a norm after it: for few rows
one kernel sends a GPU's part to the others, takes in theirs, adds and computes the norm. For other
messages each GPU writes its part into its own memory, and a kernel waits for the others, reads
their parts over NVLink and adds.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from shared.kernels.exchange import PeerAddresses, PeerSlots, exchanged_norm, exchanged_sum

MAX_BYTES = 4 * 2**20
"""Largest message: 512 rows of 4,096 bfloat16. Prompts send more, and NCCL moves it faster."""
MAX_NORM_ROWS = 128
"""Most rows of a sum and norm in one kernel; with 0 there is none, and each has its own."""
_SLOT_BYTES = 16 * 2**10
_ALL_ONES = 255
_FLAG_BYTES = 4


@dataclass(frozen=True, slots=True)
class PeerMemory:
    """A buffer on this GPU that the others of the group read, as this one reads theirs.

    Attributes:
        buffer: `[MAX_BYTES]` uint8, for one message at a time: all processes queue the same sums in
            the same order, on one stream each.
        addresses: of every process's buffer.
        slots: for rows of sums with a norm after them.
    """

    buffer: Tensor
    addresses: PeerAddresses
    slots: PeerSlots

    def fits(self, part: Tensor) -> bool:
        """Whether `sum` can add such parts; the same answer on every rank."""
        return 0 < part.nbytes <= len(self.buffer)

    def sum(self, part: Tensor) -> Tensor:
        """Returns the sum of every process's `part`; see `exchanged_sum`."""
        return exchanged_sum(part, self.addresses)

    def add_norm(
        self, part: Tensor, hidden: Tensor | None, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        """Returns `hidden` plus the sum, and its norm, of parts that fit the slots; see
        `exchanged_norm`."""
        return exchanged_norm(part, hidden, weight, eps, self.slots)


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


def open_peer_memory(
    device: torch.device, rank: int, device_indices: list[int], group_name: str
) -> PeerMemory:
    """Allocates the memory and exchanges it; all processes of the group call this together, and
    meet once more before they add.

    A process can do so for one group in its life, because torch numbers what its processes
    exchange from their start on.

    Args:
        device_indices: of all processes, by rank.

    Raises:
        RuntimeError: the driver or this torch cannot share memory.
    """
    try:
        from torch.distributed import _symmetric_memory as symmetric_memory
    except ImportError as error:
        raise RuntimeError(f"torch {torch.__version__} has no symmetric memory") from error
    size = len(device_indices)
    # A program a row, all of which a GPU must hold at the same time.
    processors = map(_num_processors, device_indices)
    num_rows = min(MAX_NORM_ROWS, *processors)
    with torch.cuda.device(device):
        size_bytes = MAX_BYTES + 2 * size * num_rows * _SLOT_BYTES
        memory = symmetric_memory.empty(size_bytes, dtype=torch.uint8, device=device)
        memory[MAX_BYTES:].fill_(_ALL_ONES)
        handle = symmetric_memory.rendezvous(memory, group_name)  # type: ignore[arg-type]
        buffers = torch.tensor(
            [
                handle.get_buffer(other, memory.shape, torch.uint8).data_ptr()
                for other in range(size)
            ],
            dtype=torch.int64,
            device=device,
        )
        addresses = PeerAddresses(
            rank,
            buffers,
            torch.tensor(handle.signal_pad_ptrs, dtype=torch.int64, device=device),
            max_programs=handle.signal_pad_size // (size * _FLAG_BYTES),
        )
        turns = torch.zeros(num_rows, dtype=torch.int32, device=device)
        slots = PeerSlots(rank, buffers + MAX_BYTES, turns, _SLOT_BYTES)
        # Before another process is told that it may send.
        torch.cuda.current_stream().synchronize()
    return PeerMemory(memory[:MAX_BYTES], addresses, slots)


def _num_processors(device_index: int) -> int:
    return torch.cuda.get_device_properties(device_index).multi_processor_count
