"""Tensor parallelism: each process of a group holds a part of every matrix on its own device.

Source: Shoeybi et al., Megatron-LM, arXiv 1909.08053, section 3.

A decode step sums small messages in memory that all GPUs of the group can read and write. A layer
needs two sums of a few kilobytes, each followed by a norm: one kernel sends a GPU's part to the
others, receives theirs, adds them and computes the norm.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import Store  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import _abort_process_group

from shared.kernels.exchange import PeerSlots, exchanged_norm, plain_sum
from shared.kernels.pointwise import Partials, add_rms_norm, total_of

MAX_ROWS = 512
"""Most rows of a sum in shared memory, as many as graphs have. For prompts NCCL is faster."""
_SLOT_BYTES = 16 * 2**10
"""Size of the longest row, 8,192 elements of 16 bits. Longer rows go through NCCL."""
_ALL_ONES = 255

logger = logging.getLogger(__name__)
_CLOSE_GRACE_S = 10.0


def peer_access_problem(device: torch.device, device_indices: list[int]) -> str | None:
    """Returns why the GPUs of a group cannot read each other's memory, or None.

    Args:
        device_indices: those of all processes, this one's included.
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
    """Allocates the shared memory and exchanges its addresses. All processes of the group call this
    together, and synchronise once more before the first sum.

    A process can do so for one group only: torch numbers its exchanges from its start.

    Args:
        device_indices: those of all processes, by rank.

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
        addresses = [
            handle.get_buffer(peer, memory.shape, torch.uint8).data_ptr() for peer in range(size)
        ]
        slots = PeerSlots(
            rank,
            memory,
            torch.tensor(addresses, dtype=torch.int64, device=device),
            torch.zeros(MAX_ROWS, dtype=torch.int32, device=device),
            _SLOT_BYTES,
            max_programs=torch.cuda.get_device_properties(device).multi_processor_count,
        )
        # The memory must be filled before another process learns that it may send.
        torch.cuda.current_stream().synchronize()
    return slots


@dataclass(frozen=True, slots=True)
class Stage:
    """This process's stage in pipeline parallelism.

    Source: Huang et al., GPipe, arXiv 1811.06965, section 2; here with one batch at a time.

    Attributes:
        index: index of this stage, from 0; ranks are numbered stage by stage.
        group: the processes of this stage, which share its layers; None where the stage has one.
    """

    index: int
    count: int
    group: TensorGroup | None = None


@dataclass(frozen=True, slots=True)
class TensorGroup:
    """A torch process group, as the layers see it: the default group, or that of a stage.

    Attributes:
        rank: from 0.
        size: number of processes, at least 2.
        gather: all-gather: fills its first argument with every process's second argument.
        slots: memory for sums of few rows; None if devices cannot read each other's memory.
        spreads_experts: expert parallelism: a process holds some experts whole, not parts of all.
        spreads_sequences: data-parallel attention: a process has its own sequences and all heads.
        graphs: CUDA graphs that hold collectives of the group; they end before the group closes.
        stage: this process's stage; None without pipeline parallelism.
        share: broadcast: fills its first argument with that of the rank in its second argument.
    """

    rank: int
    size: int
    gather: Callable[[Tensor, Tensor], object]
    slots: PeerSlots | None = None
    spreads_experts: bool = False
    spreads_sequences: bool = False
    graphs: list[torch.cuda.CUDAGraph] = field(default_factory=list, compare=False)
    stage: Stage | None = None
    share: Callable[[Tensor, int], object] = dist.broadcast

    @property
    def of_layers(self) -> TensorGroup | None:
        """The group that shares this process's layers; None where the process has them alone."""
        return self if self.stage is None else self.stage.group

    def spreading(self, *, experts: bool, sequences: bool) -> TensorGroup:
        """Returns the same group with these settings in the group that shares layers."""
        if self.stage is None:
            return replace(self, spreads_experts=experts, spreads_sequences=sequences)
        if self.stage.group is None:
            return self
        stage_group = self.stage.group.spreading(experts=experts, sequences=sequences)
        return replace(self, stage=replace(self.stage, group=stage_group))

    def sum(self, part: Tensor) -> Tensor:
        """Returns the sum of every process's `part`, in its dtype, on every process.

        An all-reduce may add in another order for another number of elements. Here parts are added
        in the order of ranks, in float32, and rounded once, so that a row's bits depend neither on
        the other rows nor on the transport. Parts are gathered: two processes exchange as many
        bytes as in an all-reduce, four processes twice as many.
        """
        return plain_sum(self._gathered(part))

    def add_norm(
        self, part: Tensor | Partials, hidden: Tensor | None, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        """Returns `hidden` plus the `sum` of parts, and the norm of that, `[T, D]` each; without
        `hidden` the `sum` alone. The bits are those of `sum` and `add_rms_norm`, whether one kernel
        computes them or two."""
        if self.slots is not None and self.slots.fits(part):
            return exchanged_norm(part, hidden, weight, eps, self.slots)
        total = self.sum(total_of(part))
        if hidden is None:
            return add_rms_norm(total, None, weight, eps)
        return add_rms_norm(hidden, total, weight, eps)

    def maximum(self, part: Tensor) -> Tensor:
        """Returns the elementwise maximum over all processes."""
        return self._gathered(part).amax(0)

    def least(self, number: int, device: torch.device) -> int:
        """Returns the minimum of the processes' numbers; waits for all processes."""
        return -int(self.maximum(torch.tensor([-number], device=device)))

    def joined(self, part: Tensor, dtype: torch.dtype) -> Tensor:
        """Returns the parts `[T, N]` of all processes side by side, `[T, size * N]` in `dtype`."""
        num_rows, num_columns = part.shape
        # One kernel transposes and converts.
        joined = part.new_empty((num_rows, self.size, num_columns), dtype=dtype)
        joined.copy_(self._gathered(part).transpose(0, 1))
        return joined.view(num_rows, self.size * num_columns)

    def stacked(self, part: Tensor) -> Tensor:
        """Returns the rows `[N, D]` of all processes one below the other, `[size * N, D]`."""
        return self._gathered(part).flatten(0, 1)

    def broadcast(self, tensor: Tensor, *, stage: int = 0) -> None:
        """Fills `tensor` with that of the first rank of a stage."""
        num_stages = 1 if self.stage is None else self.stage.count
        self.share(tensor, stage * self.size // num_stages)

    def close(self) -> None:
        """Leaves the group. No process computes any more, and others may have ended.

        NCCL waits for every graph that holds one of its collectives, so the graphs end first. An
        orderly close waits for the other processes, so an NCCL group is aborted instead.
        """
        for graph in self.graphs:
            graph.reset()
        self.graphs.clear()
        if not dist.is_initialized():
            return
        if dist.get_backend() != "nccl":
            dist.destroy_process_group()
        elif not ends_within(_CLOSE_GRACE_S, _abort_process_group):
            logger.warning("NCCL does not close the group; it closes when the process ends")

    def _gathered(self, part: Tensor) -> Tensor:
        """Returns `[size, *part.shape]`."""
        gathered = part.new_empty((self.size, *part.shape))
        if part.numel():
            self.gather(gathered.view(-1), part.contiguous().view(-1))
        return gathered


@dataclass(frozen=True, slots=True)
class Part:
    """This process's part `[T, D]` of a sum over a group; the norm after it does the sum."""

    values: Tensor | Partials
    group: TensorGroup


def open_group(
    store: Store,
    *,
    rank: int,
    size: int,
    device: torch.device,
    num_stages: int = 1,
    num_hosts: int = 1,
) -> TensorGroup:
    """Joins the processes that share `store`: NCCL among GPUs, gloo among CPUs.

    Args:
        num_stages: number of pipeline stages, a divisor of `size`; see `Stage`.
    """
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(
        backend,
        store=store,
        rank=rank,
        world_size=size,
        device_id=device if device.type == "cuda" else None,
    )
    # torch 2.13 renamed the all-gather.
    is_new = hasattr(dist, "all_gather_single")
    gather = dist.all_gather_single if is_new else dist.all_gather_into_tensor
    stage = None if num_stages == 1 else _stage(rank, size, num_stages, gather)
    group = TensorGroup(rank, size, gather, stage=stage)
    if device.type != "cuda":
        return group
    return replace(group, slots=_slots(group, device, num_hosts))


def _stage(rank: int, size: int, count: int, gather: Callable[..., object]) -> Stage:
    stage_size = size // count
    index, stage_rank = divmod(rank, stage_size)
    if stage_size == 1:
        return Stage(index, count)
    # torch requires every process to create every group.
    groups = [
        dist.new_group(list(range(first, first + stage_size)))
        for first in range(0, size, stage_size)
    ]
    group = TensorGroup(stage_rank, stage_size, partial(gather, group=groups[index]))
    return Stage(index, count, group)


def _slots(group: TensorGroup, device: torch.device, num_hosts: int) -> PeerSlots | None:
    """Returns slots in memory that the group shares; None on every rank when one rank fails."""
    indices: list[int] = []
    if group.stage is not None:
        problem: str | None = f"the model has {group.stage.count} stages"
    elif num_hosts > 1:
        problem = f"the GPUs are those of {num_hosts} hosts"
    else:
        index = torch.tensor([[device.index]], device=device)
        indices = group.joined(index, index.dtype).flatten().tolist()
        problem = peer_access_problem(device, indices)
    slots = None
    if group.least(int(problem is None), device):
        try:
            # Newer versions of torch take the group itself, older ones its name.
            name = dist.group.WORLD.group_name  # type: ignore[union-attr]
            slots = open_peer_slots(device, group.rank, indices, name)
        except RuntimeError as error:
            problem = str(error)
        if group.least(int(problem is None), device):
            return slots
    if group.rank == 0:
        reason = problem or "another process cannot share its memory"
        logger.warning("sums of small messages go through NCCL, which is slower: %s", reason)
    return None


def ends_within(limit_s: float, work: Callable[[], object]) -> bool:
    """Runs `work` on a daemon thread and waits for it at most `limit_s`; returns whether it ended
    in time."""
    thread = threading.Thread(target=work, name="closing", daemon=True)
    thread.start()
    thread.join(limit_s)
    return not thread.is_alive()
