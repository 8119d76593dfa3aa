"""Sums over the processes of a group, in which a row's bits do not depend on the other rows.

Parts are added in the order of ranks, in float32, and rounded once. One version is a kernel that
writes to the memory of the other GPUs and computes the norm as well; the other is plain torch, for
gathered parts.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from shared.kernels.pointwise import Partials


@dataclass(frozen=True, slots=True)
class PeerSlots:
    """Memory in which the GPUs of a group send each other rows; see `exchange_norm_triton`.

    Attributes:
        memory: this GPU's slots, `[2, size, max_rows, slot_bytes]` bytes, filled with ones before
            any rank sends a row. No other kernel writes to it.
        places: `[size]` int64 on this GPU, the address of each rank's memory, 16-byte aligned.
        turns: `[max_rows]` int32 on this GPU, zeros at first. No other kernel writes to it.
        slot_bytes: size of the longest row, a multiple of 16.
        max_programs: the most programs that this GPU can run at the same time.
    """

    rank: int
    memory: Tensor
    places: Tensor
    turns: Tensor
    slot_bytes: int
    max_programs: int

    def fits(self, part: Tensor | Partials) -> bool:
        """Whether `exchanged_norm` can sum such parts `[T, D]`; the same answer on every rank."""
        rows, columns = part.shape
        return 0 < rows <= len(self.turns) and columns * part.dtype.itemsize <= self.slot_bytes


def exchanged_norm(
    part: Tensor | Partials, hidden: Tensor | None, weight: Tensor, eps: float, slots: PeerSlots
) -> tuple[Tensor, Tensor]:
    """Returns `hidden` plus the sum of every rank's `part`, and its norm, `[T, D]` each.

    The bits are those of `plain_sum` and, after it, `add_rms_norm`.

    Args:
        part: `[T, D]`, of one shape and dtype on all ranks, which queue the same calls in the same
            order, each on one stream. It is rounded before it is sent.
        hidden: `[T, D]`; None adds nothing.
        weight: `[D]`, of the norm.
    """
    from shared.kernels.exchange_norm_triton import launch

    return launch(part, hidden, weight, eps, slots)


def plain_sum(parts: Tensor) -> Tensor:
    """Returns the sum of gathered `parts` `[N, ...]`, with the same bits as the kernel's."""
    if len(parts) == 2:
        # One kernel, which adds in float32 and rounds the result.
        return parts[0] + parts[1]
    total = parts[0].float()
    for part in parts[1:]:
        total = total + part
    return total.to(parts.dtype)
