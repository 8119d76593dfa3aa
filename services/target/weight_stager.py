"""Receives the weights of an update in one of the processes that share a model.

Everything here may block, and runs beside the steps: on a worker thread.
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
    """A tensor that another process sends."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    def empty(self, device: torch.device) -> torch.Tensor:
        """Raises: InvalidArgument: torch has no such dtype here, or no such shape."""
        dtype = _DTYPES.get(self.dtype.removeprefix("torch."))
        if dtype is None:
            known = ", ".join(_DTYPES)
            message = f"dtypes holds {self.dtype!r} for {self.name}; it must be one of {known}"
            raise InvalidArgument.of("WEIGHT_DTYPE_UNKNOWN", "dtypes", message)
        if any(size < 0 for size in self.shape):
            message = f"shapes holds {list(self.shape)} for {self.name}; sizes must be at least 0"
            raise InvalidArgument.of("WEIGHT_SHAPE_INVALID", "shapes", message)
        return torch.empty(self.shape, dtype=dtype, device=device)


@dataclass(frozen=True, slots=True)
class GroupTerms:
    """A group of processes that rank 0 sends weights to.

    Attributes:
        rank_offset: rank of the target's first process.
        backend: `nccl` or `gloo`; None takes what the device does.
    """

    name: str
    address: str
    port: int
    rank_offset: int
    world_size: int
    backend: str | None = None

    def problem(self, num_processes: int) -> str | None:
        """Returns why no such group can be."""
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
        """`folder` is that of the checkpoint that is served."""
        self._decoder = decoder
        self._keys = DecoderKeys.of(Checkpoint.open(folder, options.load_format).files)
        self._options = options
        self._groups: dict[str, ProcessGroup] = {}
        self.stage = self._new_stage()

    @property
    def num_processes(self) -> int:
        """Number of processes that share the model."""
        group = self._decoder.group
        return 1 if group is None else group.size

    def reset(self) -> None:
        """Drops what has been gathered."""
        self.stage = self._new_stage()

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
            InvalidArgument: they are in another format.
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
        """Joins a group; waits for all of it.

        Raises:
            FailedPrecondition: there is one of that name, or it did not come together.
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
            # It allocates memory itself, and torch keeps what steps have freed.
            torch.cuda.empty_cache()
        try:
            self._groups[terms.name] = _joined(terms, rank, backend)
        except (RuntimeError, ValueError, OSError) as error:
            message = f"the group {terms.name!r} could not be formed: {error}"
            raise FailedPrecondition(message, reason="WEIGHT_GROUP_FAILED") from error

    def leave(self, name: str) -> None:
        """Leaves a group.

        Raises:
            FailedPrecondition: there is none of that name.
        """
        dist.destroy_process_group(self._group(name))
        del self._groups[name]

    def receive(self, name: str, tensors: Sequence[TensorToCome], *, is_flattened: bool) -> None:
        """Gathers tensors that rank 0 of a group broadcasts. All are received before any is
        refused, or the sender would wait.

        Raises:
            CheckpointError: see `WeightStage.add`.
            FailedPrecondition: there is no such group, or it broke.
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
                    places: Iterable[torch.Tensor] = _unflattened(flat, shapes)
                else:
                    places = (_broadcast(shape, device, group) for shape in shapes)
                # One after the other, so that the device holds no more than one beside the model.
                for tensor, place in zip(tensors, places, strict=True):
                    try:
                        self.stage.add(tensor.name, place)
                    except CheckpointError as error:
                        problem = problem or error
        except RuntimeError as error:
            message = f"the group {name!r} broke before all of the update came: {error}"
            raise FailedPrecondition(message, reason="WEIGHT_GROUP_BROKE") from error
        if problem is not None:
            raise problem

    def add_rows(self, table: Table, start: int, end: int) -> None:
        """Takes part in `table_rows`, behind what is launched."""
        table_rows(self._decoder, table, start, end)

    def _new_stage(self) -> WeightStage:
        return WeightStage(self._decoder, self._keys, self._options)

    def _group(self, name: str) -> ProcessGroup:
        group = self._groups.get(name)
        if group is None:
            known = ", ".join(map(repr, self._groups)) or "none"
            message = f"the group {name!r} was never joined; joined are {known}"
            raise FailedPrecondition(message, reason="WEIGHT_GROUP_MISSING")
        return group


def _joined(terms: GroupTerms, rank: int, backend: str) -> ProcessGroup:
    """Joins as trainers do, who have copied this from each other: beside the default group, with
    the store below the name of the group."""
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
    _world.pg_group_ranks[group] = {each: each for each in range(size)}
    return group


@contextmanager
def _beside_steps(device: torch.device) -> Iterator[None]:
    """Queues the block's work on a GPU beside that of steps, and waits for it at the end."""
    if device.type != "cuda":
        yield
        return
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    with torch.cuda.stream(stream):
        yield
    stream.synchronize()


def _broadcast(shape: torch.Tensor, device: torch.device, group: ProcessGroup) -> torch.Tensor:
    place = torch.empty_like(shape, device=device)
    dist.broadcast(place, src=0, group=group)
    return place


def _unflattened(flat: torch.Tensor, shapes: Sequence[torch.Tensor]) -> Iterator[torch.Tensor]:
    start = 0
    for shape in shapes:
        part = flat[start : start + shape.nbytes]
        yield part.clone().view(shape.dtype).view(shape.shape)
        start += shape.nbytes


@dataclass(frozen=True, slots=True)
class RankCall:
    """A method of `WeightStager` that every process calls of its own, or `apply`: all of them put
    what they have gathered in force, if all are ready."""

    method: str
    arguments: tuple[Any, ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)

    def on(self, stager: WeightStager) -> None:
        """Calls it."""
        getattr(stager, self.method)(*self.arguments, **self.options)


class RankStages:
    """The processes of ranks 1 and above, as rank 0 sees them. On the engine thread."""

    def __init__(self, group: TensorGroup, leader: Leader, device: torch.device) -> None:
        self._group, self._leader, self._device = group, leader, device

    def tell(self, call: RankCall) -> None:
        """Has them do the same: gather beside their steps, each call behind the one before."""
        self._leader.tell(call)

    def agree(self) -> None:
        """Waits until all are ready, and has them apply.

        Raises:
            FailedPrecondition: one is not, and none applies.
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
        """Does what rank 0 announces."""
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
            # A group that is not there is found out by the one that is to receive.
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
    found = group.maximum(flags).tolist()
    return [rank for rank, has_failed in enumerate(found) if has_failed]
