"""`AdminService` of every process, with the operations that differ as hooks."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpc import aio

from shared.errors import InvalidArgument, Unimplemented
from shared.pb.outrider.admin.v1 import admin_service_pb2 as pb
from shared.pb.outrider.admin.v1 import admin_service_pb2_grpc as pb_grpc
from shared.rpc.server import Lifecycle, State

DEFAULT_GRACE_S = 30.0
_STATES = {
    State.STARTING: pb.GetServerInfoResponse.STATE_STARTING,
    State.ACTIVE: pb.GetServerInfoResponse.STATE_ACTIVE,
    State.DRAINING: pb.GetServerInfoResponse.STATE_DRAINING,
}
Context = aio.ServicerContext[Any, Any]


async def no_gauges() -> Mapping[str, float]:
    """The hook of a process without gauges."""
    return {}


@dataclass(frozen=True, slots=True)
class ProcessInfo:
    """A process's description of itself.

    Attributes:
        start_time_s: seconds since the epoch.
        settings: effective settings by flag name, secrets left out.
    """

    service: str
    version: str
    start_time_s: float
    settings: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class AdminHooks:
    """The maintenance operations of a process; None answers UNIMPLEMENTED.

    Attributes:
        drain: stops admission, waits up to the given seconds, returns the number of running
            requests.
        gauges: current values by name.
        attachments: returns the attached drafts.
        flush_prefix_cache: returns the number of freed pages.
        update_draft: loads the weights of a folder into the draft, as the given version; returns
            how long rounds waited, in seconds.
    """

    drain: Callable[[float], Awaitable[int]]
    gauges: Callable[[], Awaitable[Mapping[str, float]]] = no_gauges
    attachments: Callable[[], Awaitable[Sequence[pb.Attachment]]] | None = None
    flush_prefix_cache: Callable[[], Awaitable[int]] | None = None
    update_draft: Callable[[Path, str], Awaitable[float]] | None = None


# Abstract to the type checker; methods left out answer UNIMPLEMENTED, see `ErrorInterceptor`.
_Servicer: Any = pb_grpc.AdminServiceServicer


class AdminServicer(_Servicer):  # type: ignore[misc]
    """The maintenance port of a process. Only a target adds the methods for weights."""

    def __init__(self, info: ProcessInfo, lifecycle: Lifecycle, hooks: AdminHooks) -> None:
        self._info = info
        self._lifecycle = lifecycle
        self._hooks = hooks

    async def GetServerInfo(
        self, request: pb.GetServerInfoRequest, context: Context
    ) -> pb.GetServerInfoResponse:
        gauges = await self._hooks.gauges()
        response = pb.GetServerInfoResponse(
            service=self._info.service,
            version=self._info.version,
            state=_STATES[self._lifecycle.state],
            settings=self._info.settings,
            gauges=gauges,
        )
        response.start_time.FromNanoseconds(round(self._info.start_time_s * 1e9))
        return response

    async def ListAttachments(
        self, request: pb.ListAttachmentsRequest, context: Context
    ) -> pb.ListAttachmentsResponse:
        if self._hooks.attachments is None:
            raise Unimplemented(
                f"{self._info.service} has no attachments", reason="ATTACHMENTS_ABSENT"
            )
        return pb.ListAttachmentsResponse(attachments=await self._hooks.attachments())

    async def DrainServer(
        self, request: pb.DrainServerRequest, context: Context
    ) -> pb.DrainServerResponse:
        grace_s = _grace_s(request)
        await self._lifecycle.drain()
        # A caller who hangs up must not leave the process half drained.
        num_running = await asyncio.shield(asyncio.ensure_future(self._hooks.drain(grace_s)))
        return pb.DrainServerResponse(running_request_count=num_running)

    async def FlushPrefixCache(
        self, request: pb.FlushPrefixCacheRequest, context: Context
    ) -> pb.FlushPrefixCacheResponse:
        if self._hooks.flush_prefix_cache is None:
            raise Unimplemented(
                f"{self._info.service} has no prefix cache", reason="PREFIX_CACHE_ABSENT"
            )
        freed = await self._hooks.flush_prefix_cache()
        return pb.FlushPrefixCacheResponse(freed_page_count=freed)

    async def UpdateDraftWeights(
        self, request: pb.UpdateDraftWeightsRequest, context: Context
    ) -> pb.UpdateDraftWeightsResponse:
        if self._hooks.update_draft is None:
            raise Unimplemented(f"{self._info.service} has no draft", reason="DRAFT_ABSENT")
        pause_s = await self._hooks.update_draft(Path(request.model_path), request.weight_version)
        response = pb.UpdateDraftWeightsResponse()
        response.pause_duration.FromNanoseconds(round(pause_s * 1e9))
        return response


def _grace_s(request: pb.DrainServerRequest) -> float:
    if not request.HasField("grace_duration"):
        return DEFAULT_GRACE_S
    grace_s = request.grace_duration.ToNanoseconds() / 1e9
    if grace_s < 0:
        raise InvalidArgument.of(
            "GRACE_OUT_OF_RANGE", "grace_duration", f"the grace is {grace_s:g} s; at least 0 s"
        )
    return grace_s
