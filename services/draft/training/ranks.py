"""Processes of a training run: one, or several started by torchrun."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist


@dataclass(frozen=True, slots=True)
class Ranks:
    """This process among all.

    Attributes:
        rank: 0 writes logs and checkpoints.
        size: number of processes.
        device: of this process.
    """

    rank: int
    size: int
    device: torch.device

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def longest(self, seconds: float) -> float:
        """Returns the largest of all processes' values, so that all of them stop together."""
        if self.size == 1:
            return seconds
        value = torch.tensor(seconds, device=self.device, dtype=torch.float32)
        dist.all_reduce(value, op=dist.ReduceOp.MAX)
        return value.item()


@contextmanager
def joined(device: torch.device) -> Iterator[Ranks]:
    """Joins the processes of `torchrun`; without it this one is alone.

    Args:
        device: `cuda` stands for one GPU a process, by its rank on the host.
    """
    if not dist.is_torchelastic_launched():
        yield Ranks(rank=0, size=1, device=device)
        return
    is_cuda = device.type == "cuda"
    if is_cuda:
        device = torch.device("cuda", dist.get_node_local_rank())
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if is_cuda else "gloo")
    try:
        yield Ranks(rank=dist.get_rank(), size=dist.get_world_size(), device=device)
    finally:
        dist.destroy_process_group()
