"""Processes that hold the matrices of one model together, a part of each on its own device.

Source: Shoeybi et al., Megatron-LM, arXiv 1909.08053, section 3.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import Store  # type: ignore[attr-defined]


@dataclass(frozen=True, slots=True)
class TensorGroup:
    """The default process group of torch, as the layers see it.

    Attributes:
        rank: of this process, from 0.
        size: processes, at least 2.
        gather: fills its first argument with every process's second.
    """

    rank: int
    size: int
    gather: Callable[[Tensor, Tensor], object]

    def sum(self, part: Tensor) -> Tensor:
        """Returns the sum of every process's `part`, in its dtype, on every process.

        An all-reduce may add in another order for another number of elements. Here the parts are
        gathered and added in the order of ranks, in float32, and rounded once, so that a row's bits
        do not depend on the rows beside it. Two processes exchange as many bytes as they would in
        an all-reduce, four twice as many.
        """
        parts = self._gathered(part)
        total = parts[0].float()
        for other in parts[1:]:
            total = total + other.float()
        return total.to(part.dtype)

    def maximum(self, part: Tensor) -> Tensor:
        """Returns the largest of every process's elements, element by element."""
        return self._gathered(part).amax(0)

    def joined(self, part: Tensor) -> Tensor:
        """Returns the parts `[T, N]` of all processes side by side, `[T, size * N]`."""
        return self._gathered(part).transpose(0, 1).reshape(len(part), -1)

    def broadcast(self, tensor: Tensor) -> None:
        """Fills `tensor` with that of rank 0."""
        dist.broadcast(tensor, 0)

    def _gathered(self, part: Tensor) -> Tensor:
        """Returns `[size, *part.shape]`."""
        gathered = part.new_empty((self.size, *part.shape))
        if part.numel():
            self.gather(gathered.view(-1), part.contiguous().view(-1))
        return gathered


def open_group(store: Store, *, rank: int, size: int, device: torch.device) -> TensorGroup:
    """Joins the processes that share `store`: NCCL among GPUs, gloo among CPUs."""
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(
        backend,
        store=store,
        rank=rank,
        world_size=size,
        device_id=device if device.type == "cuda" else None,
    )
    # Its name in torch 2.13 and after, and before.
    is_new = hasattr(dist, "all_gather_single")
    return TensorGroup(
        rank, size, dist.all_gather_single if is_new else dist.all_gather_into_tensor
    )


def close_group() -> None:
    """Leaves the group, if this process is in one."""
    if dist.is_initialized():
        dist.destroy_process_group()
