"""Asks a target's maintenance port."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from grpc import aio

from shared.errors import InvalidArgument, OutriderError, Unimplemented
from shared.pb.outrider.admin.v1 import admin_service_pb2 as pb
from shared.pb.outrider.admin.v1 import admin_service_pb2_grpc as pb_grpc
from shared.rpc.channel import open_channel
from shared.rpc.status import error_from_rpc
from shared.tls import ClientTls

SHORT_CALL_S = 5.0
LONG_CALL_S = 600.0
"""Of calls that move weights, or wait for other processes."""
PAUSE_MODES = {
    "abort": pb.PAUSE_MODE_ABORT,
    "retract": pb.PAUSE_MODE_RETRACT,
    "in_place": pb.PAUSE_MODE_IN_PLACE,
}
CHECKS = {
    "checksum": pb.CheckWeightsRequest.ACTION_CHECKSUM,
    "snapshot": pb.CheckWeightsRequest.ACTION_SNAPSHOT,
    "compare": pb.CheckWeightsRequest.ACTION_COMPARE,
    "reset_tensors": pb.CheckWeightsRequest.ACTION_RESET,
}


@dataclass(frozen=True, slots=True)
class TargetStatus:
    """A target's report of its weights and its load.

    Attributes:
        pause: how generation is paused; None while it goes on.
        tp_size: processes that share every layer of a stage.
        pp_size: stages that the layers are spread over.
    """

    weight_version: str
    num_updates: int
    pause: str | None
    released: tuple[str, ...]
    tp_size: int
    pp_size: int
    num_waiting: int
    num_running: int
    num_max_tokens: int
    num_used_tokens: int
    can_release: bool


@dataclass(frozen=True, slots=True)
class GroupPlace:
    """A target's place in a group that sends weights; see `InitWeightUpdateGroupRequest`."""

    name: str
    address: str
    port: int
    rank_offset: int
    world_size: int
    backend: str


@dataclass(frozen=True, slots=True)
class SentTensor:
    """A tensor that a group sends."""

    name: str
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class WeightSource:
    """The source of new weights; exactly one attribute is set.

    Attributes:
        folder: of a checkpoint, and the format of its files.
        group: the name of a group, what it sends, and whether in one broadcast.
        safetensors: the weights themselves.
    """

    folder: tuple[str, str] | None = None
    group: tuple[str, tuple[SentTensor, ...], bool] | None = None
    safetensors: bytes | None = None

    def request(self, version: str) -> pb.UpdateWeightsRequest:
        """Returns the message."""
        request = pb.UpdateWeightsRequest(weight_version=version)
        if self.folder is not None:
            request.disk.model_path, request.disk.load_format = self.folder
        elif self.group is not None:
            name, tensors, is_flat = self.group
            sent = request.distributed
            sent.group_name, sent.is_flattened = name, is_flat
            for each in tensors:
                sent.tensors.add(name=each.name, dtype=each.dtype, shape=each.shape)
        else:
            request.safetensors = self.safetensors or b""
        return request


class TargetAdmin:
    """The maintenance port of one target. Every call raises an `OutriderError` in the words of its
    status; Unimplemented where the address is no such port.

    Attributes:
        address: `host:port`.
    """

    def __init__(self, address: str, tls: ClientTls | None = None) -> None:
        self.address = address
        self._tls = tls

    async def flush(self, *, only_when_idle: bool = False) -> int:
        """Drops the unused pages of the prefix cache; returns how many."""
        request = pb.FlushPrefixCacheRequest(only_when_idle=only_when_idle)
        return int((await self._call("FlushPrefixCache", request)).freed_page_count)

    async def status(self) -> TargetStatus:
        """Returns what is in force."""
        found = await self._call("GetWeightStatus", pb.GetWeightStatusRequest())
        names = {number: name for name, number in PAUSE_MODES.items()}
        pp_size = found.stage_count or 1
        return TargetStatus(
            found.weight_version,
            found.update_count,
            names.get(found.pause_mode),
            tuple(found.released_tags),
            found.process_count // pp_size,
            pp_size,
            found.waiting_request_count,
            found.running_request_count,
            found.max_token_count,
            found.used_token_count,
            found.can_release_memory,
        )

    async def pause(self, mode: str) -> int:
        """Holds generation; returns how many requests were ended or sent back."""
        number = PAUSE_MODES.get(mode)
        if number is None:
            message = f"mode is {mode!r}; it must be one of {', '.join(PAUSE_MODES)}"
            raise InvalidArgument.of("PAUSE_MODE_UNKNOWN", "mode", message)
        request = pb.PauseGenerationRequest(mode=number)
        return int((await self._call("PauseGeneration", request, LONG_CALL_S)).request_count)

    async def resume(self) -> bool:
        """Lets generation go on; returns whether that dropped an update that had not ended."""
        request = pb.ContinueGenerationRequest()
        return bool((await self._call("ContinueGeneration", request)).dropped_update)

    async def begin(self) -> None:
        """Has updates gathered."""
        await self._call("BeginWeightUpdate", pb.BeginWeightUpdateRequest())

    async def update(self, source: WeightSource, version: str) -> dict[str, Any]:
        """Replaces weights, or gathers them; returns what that did."""
        found = await self._call("UpdateWeights", source.request(version), LONG_CALL_S)
        return _update(found)

    async def end(self, version: str, *, drop: bool = False) -> dict[str, Any]:
        """Applies the gathered tensors, or drops them; returns what that did."""
        request = pb.EndWeightUpdateRequest(weight_version=version, drop=drop)
        return _update(await self._call("EndWeightUpdate", request, LONG_CALL_S))

    async def join(self, place: GroupPlace) -> None:
        """Joins a group; waits for all of it."""
        request = pb.InitWeightUpdateGroupRequest(
            master_address=place.address,
            master_port=place.port,
            rank_offset=place.rank_offset,
            world_size=place.world_size,
            group_name=place.name,
            backend=place.backend,
        )
        await self._call("InitWeightUpdateGroup", request, LONG_CALL_S)

    async def leave(self, group: str) -> None:
        """Leaves a group."""
        request = pb.DestroyWeightUpdateGroupRequest(group_name=group)
        await self._call("DestroyWeightUpdateGroup", request, LONG_CALL_S)

    async def check(self, action: str) -> tuple[Mapping[str, str], Sequence[str]]:
        """Returns checksums, or the names of tensors that changed."""
        number = CHECKS.get(action)
        if number is None:
            message = f"action is {action!r}; it must be one of {', '.join(CHECKS)}"
            raise InvalidArgument.of("WEIGHT_ACTION_UNKNOWN", "action", message)
        request = pb.CheckWeightsRequest(action=number)
        found = await self._call("CheckWeights", request, LONG_CALL_S)
        return dict(found.checksums), tuple(found.changed)

    async def release(self, tags: Sequence[str]) -> tuple[int, Sequence[str]]:
        """Frees memory; returns the bytes, and the memory that was kept with the reason."""
        found = await self._call("ReleaseMemory", pb.ReleaseMemoryRequest(tags=tags), LONG_CALL_S)
        return found.freed_bytes, tuple(found.kept)

    async def reoccupy(self, tags: Sequence[str]) -> None:
        """Takes memory again."""
        await self._call("ResumeMemory", pb.ResumeMemoryRequest(tags=tags), LONG_CALL_S)

    async def _call(self, method: str, request: Any, timeout_s: float = SHORT_CALL_S) -> Any:
        async with self._stub() as stub:
            return await getattr(stub, method)(request, timeout=timeout_s)

    @asynccontextmanager
    async def _stub(self) -> AsyncIterator[pb_grpc.AdminServiceStub]:
        async with open_channel(self.address, self._tls) as channel:
            try:
                yield pb_grpc.AdminServiceStub(channel)
            except aio.AioRpcError as failure:
                raise self._named(error_from_rpc(failure)) from failure

    def _named(self, error: OutriderError) -> OutriderError:
        if not isinstance(error, Unimplemented):
            return error
        message = f"{self.address} is not the maintenance port of a target: {error.message}"
        return Unimplemented(message, reason=error.reason)


def _update(response: Any) -> dict[str, Any]:
    """Returns what an update did; nothing where it was gathered only."""
    if not response.HasField("update"):
        return {}
    update = response.update
    return {
        "weight_version": update.weight_version,
        "num_retracted_requests": update.retracted_request_count,
        "freed_page_count": update.freed_page_count,
        "pause_s": update.pause_duration.ToNanoseconds() / 1e9,
    }
