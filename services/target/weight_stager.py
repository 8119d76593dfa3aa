"""Gathers the weights of an update in one of the processes that share a model.

Gathering may block, so it runs on a worker thread beside the steps.
"""

from __future__ import annotations

import datetime
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from safetensors.torch import load
from torch.distributed.distributed_c10d import (
    PrefixStore,
    ProcessGroup,
    _new_process_group_helper,
    _world,
)
from torch.distributed.rendezvous import rendezvous

from shared.errors import CheckpointError, FailedPrecondition, InvalidArgument
from shared.layers.tensor_group import TensorGroup
from shared.model_options import LoadFormat, ModelOptions
from shared.models.checkpoint import Checkpoint
from shared.models.decoder import Decoder
from shared.models.decoder_weights import DecoderKeys
from shared.models.heads.target_tensors import Table, table_rows
from shared.models.weight_update import WeightStage
from shared.runtime.lockstep import Leader

logger = logging.getLogger(__name__)
_GROUP_TIMEOUT = datetime.timedelta(seconds=300)
_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        *(torch.float32, torch.bfloat16, torch.float16, torch.float64),
        *(torch.float8_e4m3fn, torch.int8, torch.uint8, torch.int32, torch.int64),
    )
}


@dataclass(frozen=True, slots=True)
class TensorToCome:
    """Name, dtype and shape of a tensor that another process will send."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    def empty(self, device: torch.device) -> torch.Tensor:
        """Returns an uninitialised tensor.

        Raises:
            InvalidArgument: the dtype is not supported, or a size is negative.
        """
        dtype = _DTYPES.get(self.dtype.removeprefix("torch."))
        if dtype is None:
            choices = ", ".join(_DTYPES)
            message = f"dtypes holds {self.dtype!r} for {self.name}; it must be one of {choices}"
            raise InvalidArgument.of("WEIGHT_DTYPE_UNKNOWN", "dtypes", message)
        if any(size < 0 for size in self.shape):
            message = f"shapes holds {list(self.shape)} for {self.name}; sizes must be at least 0"
            raise InvalidArgument.of("WEIGHT_SHAPE_INVALID", "shapes", message)
        return torch.empty(self.shape, dtype=dtype, device=device)


@dataclass(frozen=True, slots=True)
class GroupTerms:
    """A process group in which rank 0 sends weights.

    Attributes:
        rank_offset: rank of the target's first process in the group.
        backend: `nccl` or `gloo`; None takes the one for the device.
    """

    name: str
    address: str
    port: int
    rank_offset: int
    world_size: int
    backend: str | None = None

    def problem(self, num_processes: int) -> str | None:
        """Returns why the target cannot join such a group; None if it can."""
        last = self.rank_offset + num_processes - 1
        if not self.rank_offset >= 1 or last >= self.world_size:
            return (
                f"rank_offset is {self.rank_offset} and world_size {self.world_size}; the target's "
                f"{num_processes} processes need ranks in [1, world_size)"
            )
        return None


class WeightStager:
    """Gathers an update for this process's part of the model."""

    def __init__(self, decoder: Decoder, folder: Path, options: ModelOptions) -> None:
        """`folder` is the folder of the served checkpoint."""
        self._decoder = decoder
        self._keys = DecoderKeys.of(Checkpoint.open(folder, options.load_format).files)
        self._options = options
        self._groups: dict[str, ProcessGroup] = {}
        self.reset()

    @property
    def num_processes(self) -> int:
        """Number of processes that share the model."""
        group = self._decoder.group
        return 1 if group is None else group.size

    def reset(self) -> None:
        """Drops the tensors gathered so far."""
        self.stage = WeightStage(self._decoder, self._keys, self._options)

    def read(self, folder: Path, load_format: LoadFormat) -> None:
        """Gathers a checkpoint.

        Raises:
            CheckpointError: see `WeightStage.read`.
        """
        if not folder.is_dir():
            raise CheckpointError(f"model_path is {folder}, which is no folder here")
        self.stage.read(folder, load_format)

    def load(self, content: bytes) -> None:
        """Gathers tensors in the format of safetensors.

        Raises:
            CheckpointError: see `WeightStage.add`.
            InvalidArgument: the content is in another format.
        """
        try:
            tensors = load(content)
        except SafetensorError as error:
            message = f"serialized_named_tensors is not in the format of safetensors: {error}"
            raise InvalidArgument.of(
                "WEIGHTS_NOT_SAFETENSORS", "serialized_named_tensors", message
            ) from error
        for name, tensor in tensors.items():
            self.stage.check(name, tuple(tensor.shape))
        for name, tensor in tensors.items():
            self.stage.add(name, tensor)

    def join(self, terms: GroupTerms) -> None:
        """Joins a group; waits for all its processes.

        Raises:
            FailedPrecondition: a group of that name was joined before, or it could not be formed.
            InvalidArgument: the backend is `nccl` and the target computes on the CPU.
        """
        if terms.name in self._groups:
            message = f"the group {terms.name!r} is joined already; destroy it first"
            raise FailedPrecondition(message, reason="WEIGHT_GROUP_EXISTS")
        group, is_cuda = self._decoder.group, self._decoder.device.type == "cuda"
        backend = terms.backend or ("nccl" if is_cuda else "gloo")
        if backend == "nccl" and not is_cuda:
            message = "backend is nccl; this target computes on the CPU, which takes gloo"
            raise InvalidArgument.of("WEIGHT_GROUP_BACKEND", "backend", message)
        rank = terms.rank_offset + (0 if group is None else group.rank)
        if backend == "nccl":
            # NCCL allocates its own memory, while torch caches the memory that steps have freed.
            torch.cuda.empty_cache()
        try:
            self._groups[terms.name] = _joined(terms, rank, backend)
        except (RuntimeError, ValueError, OSError) as error:
            message = f"the group {terms.name!r} could not be formed: {error}"
            raise FailedPrecondition(message, reason="WEIGHT_GROUP_FAILED") from error

    def leave(self, name: str) -> None:
        """Leaves a group.

        Raises:
            FailedPrecondition: no group of that name was joined.
        """
        dist.destroy_process_group(self._group(name))
        del self._groups[name]

    def receive(self, name: str, tensors: Sequence[TensorToCome], *, is_flattened: bool) -> None:
        """Gathers tensors that rank 0 of a group broadcasts. All tensors are received before one is
        refused: else the sender would wait.

        Raises:
            CheckpointError: see `WeightStage.add`.
            FailedPrecondition: no group of that name was joined, or the group broke.
        """
        group, device = self._group(name), self._decoder.device
        shapes = [tensor.empty(torch.device("meta")) for tensor in tensors]
        problem: CheckpointError | None = None
        try:
            with _beside_steps(device):
                if is_flattened:
                    size_bytes = sum(shape.nbytes for shape in shapes)
                    flat = torch.empty(size_bytes, dtype=torch.uint8, device=device)
                    dist.broadcast(flat, src=0, group=group)
                    received: Iterable[torch.Tensor] = _unflattened(flat, shapes)
                else:
                    received = (_broadcast(shape, device, group) for shape in shapes)
                # One at a time, so that the device holds only one tensor beside the model.
                for tensor, value in zip(tensors, received, strict=True):
                    try:
                        self.stage.add(tensor.name, value)
                    except CheckpointError as error:
                        problem = problem or error
        except RuntimeError as error:
            message = f"the group {name!r} broke before all of the update came: {error}"
            raise FailedPrecondition(message, reason="WEIGHT_GROUP_BROKE") from error
        if problem is not None:
            raise problem

    def add_rows(self, table: Table, start: int, end: int) -> None:
        """Takes part in the collective call of `table_rows`, after the launched steps."""
        table_rows(self._decoder, table, start, end)

    def _group(self, name: str) -> ProcessGroup:
        group = self._groups.get(name)
        if group is None:
            joined = ", ".join(map(repr, self._groups)) or "none"
            message = f"the group {name!r} was never joined; joined are {joined}"
            raise FailedPrecondition(message, reason="WEIGHT_GROUP_MISSING")
        return group


def _joined(terms: GroupTerms, rank: int, backend: str) -> ProcessGroup:
    """Joins a group beside torch's default group, with a store prefixed by the group's name: the
    same calls as in the trainers, which have copied them from each other."""
    url = f"tcp://{terms.address}:{terms.port}"
    store, rank, size = next(rendezvous(url, rank, terms.world_size, timeout=_GROUP_TIMEOUT))
    store.set_timeout(_GROUP_TIMEOUT)
    group, _ = _new_process_group_helper(
        size,
        rank,
        [],
        backend,
        PrefixStore(terms.name, store),
        group_name=terms.name,  # type: ignore[arg-type]
        timeout=_GROUP_TIMEOUT,
    )
    assert isinstance(group, ProcessGroup)
    _world.pg_group_ranks[group] = {rank: rank for rank in range(size)}
    return group


@contextmanager
def _beside_steps(device: torch.device) -> Iterator[None]:
    """Queues the block's GPU work on its own stream, beside the steps; waits at the end."""
    if device.type != "cuda":
        yield
        return
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    with torch.cuda.stream(stream):
        yield
    stream.synchronize()


def _broadcast(shape: torch.Tensor, device: torch.device, group: ProcessGroup) -> torch.Tensor:
    tensor = torch.empty_like(shape, device=device)
    dist.broadcast(tensor, src=0, group=group)
    return tensor


def _unflattened(flat: torch.Tensor, shapes: Sequence[torch.Tensor]) -> Iterator[torch.Tensor]:
    start = 0
    for shape in shapes:
        part = flat[start : start + shape.nbytes]
        yield part.clone().view(shape.dtype).view(shape.shape)
        start += shape.nbytes


@dataclass(frozen=True, slots=True)
class RankCall:
    """A method of `WeightStager` that every rank calls on its own stager; or `apply`, by which all
    ranks apply the weights they have gathered, if all are ready."""

    method: str
    arguments: tuple[Any, ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)

    def on(self, stager: WeightStager) -> None:
        """Calls the method."""
        getattr(stager, self.method)(*self.arguments, **self.options)


class RankStages:
    """Rank 0's view of the stagers of ranks 1 and above. Used on the engine thread."""

    def __init__(self, group: TensorGroup, leader: Leader, device: torch.device) -> None:
        self._group, self._leader, self._device = group, leader, device

    def tell(self, call: RankCall) -> None:
        """Has the other ranks do the same call, one after the other, beside their steps."""
        self._leader.tell(call)

    def agree(self) -> None:
        """Waits until all ranks have gathered the update, and has the other ranks apply it.

        Raises:
            FailedPrecondition: a rank could not gather it; no rank applies it then.
        """
        self._leader.tell(RankCall("apply"))
        failed = _failed_ranks(self._group, self._device, is_ready=True)
        if failed:
            ranks = ", ".join(map(str, failed))
            raise FailedPrecondition(
                f"rank {ranks} could not gather the update, see its log; no rank has taken it",
                reason="WEIGHT_UPDATE_RANK_FAILED",
            )


class FollowingStager:
    """The `WeightStager` of a process of rank 1 or above."""

    def __init__(self, stager: WeightStager, group: TensorGroup, device: torch.device) -> None:
        self._stager, self._group, self._device = stager, group, device
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="weights")
        self._is_sound = True

    def take(self, call: RankCall) -> None:
        """Does a call that rank 0 announces."""
        if call.method == "add_rows":
            call.on(self._stager)
        elif call.method == "apply":
            self._apply()
        else:
            self._worker.submit(self._gather, call)

    def _apply(self) -> None:
        self._worker.submit(lambda: None).result()
        if self._is_sound:
            self._is_sound = self._is_ready()
        if not _failed_ranks(self._group, self._device, is_ready=self._is_sound):
            self._stager.stage.apply()
        self._stager.reset()

    def _gather(self, call: RankCall) -> None:
        self._is_sound = self._is_sound or call.method == "reset"
        try:
            call.on(self._stager)
        except Exception:
            logger.exception("cannot gather an update of the weights")
            # Without a group the later `receive` fails, so these calls do not fail the update.
            self._is_sound = call.method in ("join", "leave")

    def _is_ready(self) -> bool:
        try:
            self._stager.stage.check_ready()
        except (CheckpointError, RuntimeError):
            logger.exception("cannot take an update of the weights")
            return False
        return True


def _failed_ranks(group: TensorGroup, device: torch.device, *, is_ready: bool) -> list[int]:
    flags = torch.zeros(group.size, dtype=torch.int64, device=device)
    flags[group.rank] = int(not is_ready)
    return [rank for rank, has_failed in enumerate(group.maximum(flags).tolist()) if has_failed]
