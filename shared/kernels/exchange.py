"""Sums over the processes of a group, which must not depend on the rows beside a row.

Parts are added in the order of ranks, in float32, and rounded once: by one kernel that reads the
memory of the other GPUs, or in plain torch once the parts have been gathered.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class PeerAddresses:
    """Where the GPUs of a group lay their parts and wait for each other.

    Attributes:
        rank: of this process.
        buffers: `[size]` int64 on this GPU, where it finds each rank's memory, 16-byte aligned.
        flags: `[size]` int64 likewise; zeros, which no other kernel writes.
        max_programs: programs that the flags suffice for.
    """

    rank: int
    buffers: Tensor
    flags: Tensor
    max_programs: int


def exchanged_sum(part: Tensor, peers: PeerAddresses) -> Tensor:
    """Returns the sum of every rank's `part`, of one shape and dtype, which all queue alike."""
    from shared.kernels.exchange_triton import launch

    return launch(part.contiguous(), peers)


def plain_sum(parts: Tensor) -> Tensor:
    """Returns the sum of gathered `parts` `[N, ...]`: the same bits, on any device."""
    if len(parts) == 2:
        # One kernel, which adds in float32 and rounds the result.
        return parts[0] + parts[1]
    total = parts[0].float()
    for other in parts[1:]:
        total = total + other
    return total.to(parts.dtype)
