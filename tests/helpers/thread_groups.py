"""Tensor groups whose ranks are threads of one process and exchange tensors in memory."""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch
from torch import Tensor

from shared.layers.tensor_group import Stage, TensorGroup

Gather = Callable[[Tensor, Tensor], object]
Share = Callable[[Tensor, int], object]


def _meeting(size: int) -> list[tuple[Gather, Share]]:
    """Returns the functions `gather` and `share` of each rank of a group."""
    barrier, parts = threading.Barrier(size, timeout=30.0), [torch.empty(0)] * size

    def of(rank: int) -> tuple[Gather, Share]:
        def gather(gathered: Tensor, part: Tensor) -> None:
            parts[rank] = part.clone()
            barrier.wait()
            gathered.copy_(torch.cat(parts))
            barrier.wait()

        def share(tensor: Tensor, source: int) -> None:
            parts[rank] = tensor
            barrier.wait()
            tensor.copy_(parts[source])
            barrier.wait()

        return gather, share

    return [of(rank) for rank in range(size)]


def thread_groups(tp_size: int, pp_size: int) -> list[TensorGroup]:
    """Returns the group of each rank, as `open_group` makes it."""
    size = tp_size * pp_size
    all_ranks = _meeting(size)
    stages = [_meeting(tp_size) for _ in range(pp_size)]

    def of(rank: int) -> TensorGroup:
        gather, share = all_ranks[rank]
        if pp_size == 1:
            return TensorGroup(rank, size, gather)
        index, own_rank = divmod(rank, tp_size)
        own = TensorGroup(own_rank, tp_size, stages[index][own_rank][0]) if tp_size > 1 else None
        return TensorGroup(rank, size, gather, stage=Stage(index, pp_size, own), share=share)

    return [of(rank) for rank in range(size)]
