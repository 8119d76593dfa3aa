"""Client of a target's maintenance port."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from grpc import aio

from shared.errors import InvalidArgument, Unimplemented
from shared.pb.outrider.admin.v1 import admin_service_pb2 as pb
from shared.pb.outrider.admin.v1 import admin_service_pb2_grpc as pb_grpc
from shared.rpc.channel import open_channel
from shared.rpc.status import error_from_rpc
from shared.tls import ClientTls

SHORT_CALL_S = 5.0
LONG_CALL_S = 600.0
"""Timeout of calls that move weights, or wait for other processes."""
Update = dict[str, Any]
"""The effects of a weight update, by name."""
TensorToCome = tuple[str, str, Sequence[int]]
"""Name, dtype and shape."""
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


class TargetAdmin:
    """The maintenance port of one target. A failed call raises the `OutriderError` of its status;
    it is Unimplemented if the address is no maintenance port.

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
        response = await self._call("GetWeightStatus", pb.GetWeightStatusRequest())
        names = {number: name for name, number in PAUSE_MODES.items()}
        pp_size = response.stage_count or 1
        return TargetStatus(
            response.weight_version,
            response.update_count,
            names.get(response.pause_mode),
            tuple(response.released_tags),
            response.process_count // pp_size,
            pp_size,
            response.waiting_request_count,
            response.running_request_count,
            response.max_token_count,
            response.used_token_count,
            response.can_release_memory,
        )

    async def pause(self, mode: str) -> int:
        """Pauses generation; returns how many requests were aborted or put back into the queue."""
        number = PAUSE_MODES.get(mode)
        if number is None:
            message = f"mode is {mode!r}; it must be one of {', '.join(PAUSE_MODES)}"
            raise InvalidArgument.of("PAUSE_MODE_UNKNOWN", "mode", message)
        request = pb.PauseGenerationRequest(mode=number)
        return int((await self._call("PauseGeneration", request, LONG_CALL_S)).request_count)

    async def resume(self) -> bool:
        """Resumes generation; returns whether that dropped an unfinished update."""
        request = pb.ContinueGenerationRequest()
        return bool((await self._call("ContinueGeneration", request)).dropped_update)

    async def begin(self) -> None:
        """Starts an update in parts: the target stages tensors until `end`."""
        await self._call("BeginWeightUpdate", pb.BeginWeightUpdateRequest())

    async def update_from_folder(self, folder: str, load_format: str, version: str) -> Update:
        """Applies or stages the weights of a checkpoint."""
        disk = pb.UpdateWeightsRequest.Disk(model_path=folder, load_format=load_format)
        return await self._update(pb.UpdateWeightsRequest(weight_version=version, disk=disk))

    async def update_from_tensors(self, safetensors: bytes, version: str) -> Update:
        """Applies or stages tensors in the format of safetensors."""
        request = pb.UpdateWeightsRequest(weight_version=version, safetensors=safetensors)
        return await self._update(request)

    async def update_from_group(
        self, group: str, tensors: Sequence[TensorToCome], version: str, *, is_flat: bool
    ) -> Update:
        """Applies or stages tensors that a group broadcasts, together or one by one."""
        request = pb.UpdateWeightsRequest(weight_version=version)
        broadcast = request.distributed
        broadcast.group_name, broadcast.is_flattened = group, is_flat
        for name, dtype, shape in tensors:
            broadcast.tensors.add(name=name, dtype=dtype, shape=shape)
        return await self._update(request)

    async def end(self, version: str, *, drop: bool = False) -> Update:
        """Applies the staged tensors, or drops them."""
        request = pb.EndWeightUpdateRequest(weight_version=version, drop=drop)
        return await self._update(request, "EndWeightUpdate")

    async def join(
        self, group: str, address: str, port: int, rank_offset: int, world_size: int, backend: str
    ) -> None:
        """Joins a group, see `InitWeightUpdateGroupRequest`; waits for all members."""
        request = pb.InitWeightUpdateGroupRequest(
            master_address=address,
            master_port=port,
            rank_offset=rank_offset,
            world_size=world_size,
            group_name=group,
            backend=backend,
        )
        await self._call("InitWeightUpdateGroup", request, LONG_CALL_S)

    async def leave(self, group: str) -> None:
        request = pb.DestroyWeightUpdateGroupRequest(group_name=group)
        await self._call("DestroyWeightUpdateGroup", request, LONG_CALL_S)

    async def check(self, action: str) -> tuple[Mapping[str, str], Sequence[str]]:
        """Returns checksums, or the names of tensors that changed."""
        number = CHECKS.get(action)
        if number is None:
            message = f"action is {action!r}; it must be one of {', '.join(CHECKS)}"
            raise InvalidArgument.of("WEIGHT_ACTION_UNKNOWN", "action", message)
        request = pb.CheckWeightsRequest(action=number)
        response = await self._call("CheckWeights", request, LONG_CALL_S)
        return dict(response.checksums), tuple(response.changed)

    async def release(self, tags: Sequence[str]) -> tuple[int, Sequence[str]]:
        """Frees memory; returns the bytes, and what was kept and why."""
        response = await self._call(
            "ReleaseMemory", pb.ReleaseMemoryRequest(tags=tags), LONG_CALL_S
        )
        return response.freed_bytes, tuple(response.kept)

    async def reoccupy(self, tags: Sequence[str]) -> None:
        """Allocates released memory again."""
        await self._call("ResumeMemory", pb.ResumeMemoryRequest(tags=tags), LONG_CALL_S)

    async def _update(self, request: Any, method: str = "UpdateWeights") -> Update:
        """Returns the effects of an update; none if the tensors were only staged."""
        response = await self._call(method, request, LONG_CALL_S)
        if not response.HasField("update"):
            return {}
        update = response.update
        return {
            "weight_version": update.weight_version,
            "num_retracted_requests": update.retracted_request_count,
            "freed_page_count": update.freed_page_count,
            "pause_s": update.pause_duration.ToNanoseconds() / 1e9,
        }

    async def _call(self, method: str, request: Any, timeout_s: float = SHORT_CALL_S) -> Any:
        async with open_channel(self.address, self._tls) as channel:
            stub = pb_grpc.AdminServiceStub(channel)
            try:
                return await getattr(stub, method)(request, timeout=timeout_s)
            except aio.AioRpcError as failure:
                error = error_from_rpc(failure)
                if isinstance(error, Unimplemented):
                    address = f"{self.address} is not the maintenance port of a target"
                    error = Unimplemented(f"{address}: {error.message}", reason=error.reason)
                raise error from failure
