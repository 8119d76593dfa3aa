"""Memory that all GPUs of a group can read and write, for the sums of a decode step.

A layer needs two sums of a few kilobytes, each with a norm after it: one kernel sends a GPU's part
to the others, takes in theirs, adds and computes the norm.
"""

from __future__ import annotations

import torch

from shared.kernels.exchange import PeerSlots

MAX_ROWS = 512
"""Most rows of such a sum, as many as graphs have. Prompts have more: NCCL moves them faster."""
_SLOT_BYTES = 16 * 2**10
"""Of the longest row, 8,192 numbers of 16 bits. Longer ones go through NCCL."""
_ALL_ONES = 255


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


def open_peer_slots(
    device: torch.device, rank: int, device_indices: list[int], group_name: str
) -> PeerSlots:
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
    with torch.cuda.device(device):
        size_bytes = 2 * size * MAX_ROWS * _SLOT_BYTES
        memory = symmetric_memory.empty(size_bytes, dtype=torch.uint8, device=device)
        memory.fill_(_ALL_ONES)
        handle = symmetric_memory.rendezvous(memory, group_name)  # type: ignore[arg-type]
        places = [
            handle.get_buffer(other, memory.shape, torch.uint8).data_ptr() for other in range(size)
        ]
        slots = PeerSlots(
            rank,
            memory,
            torch.tensor(places, dtype=torch.int64, device=device),
            torch.zeros(MAX_ROWS, dtype=torch.int32, device=device),
            _SLOT_BYTES,
            max_programs=torch.cuda.get_device_properties(device).multi_processor_count,
        )
        # Before another process is told that it may send.
        torch.cuda.current_stream().synchronize()
    return slots
