"""`AdminService` of a target: the calls that every process has, and the calls for weights."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from services.target.drafts.attachment import AttachmentStatus, IdleReason
from services.target.engine import Engine
from services.target.metrics import shape_figures, wanted_figures
from services.target.requests.generate_service import duration_message
from services.target.settings import TargetSettings
from services.target.step_report import EngineGauges, shape_name
from services.target.weight_control import MemoryTag, PauseMode, Updated, WeightControl
from services.target.weight_stager import GroupTerms, TensorToCome, WeightStager
from services.target.weight_updates import WeightUpdates
from shared.errors import InvalidArgument
from shared.pb.outrider.admin.v1 import admin_service_pb2 as pb
from shared.rpc.admin_service import AdminHooks, AdminServicer, Context, ProcessInfo
from shared.rpc.server import Lifecycle
from shared.settings import shown_settings
from shared.version import package_version


def gauge_values(gauges: EngineGauges) -> Mapping[str, float]:
    """Returns the live figures by their names on the wire."""
    return {
        "waiting_request_count": gauges.num_waiting,
        "running_request_count": gauges.num_running,
        "page_count": gauges.num_pages,
        "free_page_count": gauges.num_free_pages,
        "cached_page_count": gauges.num_cached_pages,
        "held_page_count": gauges.num_held_pages,
        "drafted_for_sequence_count": gauges.num_drafted_for,
        "paused_sequence_count": gauges.num_paused,
        "probe_seconds": gauges.probe_s,
        "speculation_on": float(gauges.speculates),
        **shape_figures("round", gauges.round_shape),
        **{
            f"round_ms_of_{shape_name(choice)}_for_{size}": 1e3 * seconds
            for (choice, size), seconds in gauges.round_s.items()
        },
    }


def wanted_gauges(statuses: Iterable[AttachmentStatus]) -> Mapping[str, float]:
    """Returns the gauges of each draft, by names that end in its attachment id."""
    return {
        f"{name}_of_{status.attachment.identity.attachment_id}": value
        for status in statuses
        for name, value in wanted_figures(status).items()
    }


def attachment_message(status: AttachmentStatus) -> pb.Attachment:
    """Returns the message about one draft."""
    attachment = status.attachment
    identity, counters = attachment.identity, attachment.counters
    wanted: Mapping[str, Any] = wanted_figures(status)
    message = pb.Attachment(
        attachment_id=identity.attachment_id,
        worker_id=identity.worker_id,
        model_id=identity.model_id,
        algorithm=identity.algorithm,
        sequence_count=len(attachment.sequence_ids),
        verified_round_count=counters.num_verified_rounds,
        accepted_token_count=counters.num_accepted,
        missed_round_count=counters.num_missed_rounds,
        stale_candidate_count=counters.num_stale_candidates,
        paused_sequence_count=status.num_paused,
        level_acceptances=status.level_rates,
        turnaround_duration=duration_message(attachment.timeout.response_s or 0.0),
        draft_duration=duration_message(attachment.report.draft_s or 0.0),
        warming=status.idle is not None and status.idle.reason is IdleReason.WARMING_UP,
        idle_detail="" if status.idle is None else status.idle.detail,
        **wanted,
    )
    message.attach_time.FromNanoseconds(round(identity.attach_time_s * 1e9))
    return message


_MODE_NUMBERS = {
    None: pb.PAUSE_MODE_UNSPECIFIED,
    PauseMode.ABORT: pb.PAUSE_MODE_ABORT,
    PauseMode.RETRACT: pb.PAUSE_MODE_RETRACT,
    PauseMode.IN_PLACE: pb.PAUSE_MODE_IN_PLACE,
}
_MODES = {number: mode or PauseMode.ABORT for mode, number in _MODE_NUMBERS.items()}


class TargetAdminServicer(AdminServicer):
    """`AdminService` of a target."""

    def __init__(
        self,
        engine: Engine,
        settings: TargetSettings,
        lifecycle: Lifecycle,
        *,
        drain: Callable[[float], Awaitable[int]],
        draft_settings: Mapping[str, str],
        update_draft: Callable[[Path, str], Awaitable[float]] | None,
    ) -> None:
        """For `drain` and `update_draft` see `AdminHooks`; `draft_settings` are an embedded
        draft's."""
        # The verification mode is shown as the rule that all flags together name.
        mode = {"verification-mode": settings.verification.value}
        shown = {**draft_settings, **shown_settings(settings), **mode}
        info = ProcessInfo("target", package_version(), time.time(), shown)
        hooks = AdminHooks(
            drain, self._gauges, self._attachments, self._flush, update_draft=update_draft
        )
        super().__init__(info, lifecycle, hooks)
        self._engine, self._ranks = engine, settings.ranks
        self._updates = WeightUpdates(
            engine,
            lambda: WeightStager(engine.decoder, settings.model_path, settings.model_options),
        )

    async def _gauges(self) -> Mapping[str, float]:
        gauges = await asyncio.wrap_future(self._engine.gauges())
        statuses = await asyncio.wrap_future(self._engine.attachments())
        return {**gauge_values(gauges), **wanted_gauges(statuses)}

    async def _attachments(self) -> Sequence[pb.Attachment]:
        statuses = await asyncio.wrap_future(self._engine.attachments())
        return [attachment_message(status) for status in statuses]

    async def _flush(self) -> int:
        return await asyncio.wrap_future(self._engine.flush_prefix_cache())

    async def FlushPrefixCache(
        self, request: pb.FlushPrefixCacheRequest, context: Context
    ) -> pb.FlushPrefixCacheResponse:
        if not request.only_when_idle:
            return await super().FlushPrefixCache(request, context)
        freed = await self._updates.with_weights(lambda weights: weights.flush_if_idle())
        return pb.FlushPrefixCacheResponse(freed_page_count=freed)

    async def GetWeightStatus(
        self, request: pb.GetWeightStatusRequest, context: Context
    ) -> pb.GetWeightStatusResponse:
        def status(weights: WeightControl) -> pb.GetWeightStatusResponse:
            gauges = self._engine.gauges_now()
            return pb.GetWeightStatusResponse(
                weight_version=weights.version.name,
                update_count=weights.version.num_updates,
                pause_mode=_MODE_NUMBERS[weights.mode],
                released_tags=sorted(tag.value for tag in weights.released),
                process_count=self._ranks.size,
                stage_count=self._ranks.pp_size,
                waiting_request_count=gauges.num_waiting,
                running_request_count=gauges.num_running,
                max_token_count=gauges.num_pages * self._engine.page_size,
                used_token_count=gauges.num_held_pages * self._engine.page_size,
                can_release_memory=weights.memory.is_movable,
            )

        return await self._updates.with_weights(status)

    async def PauseGeneration(
        self, request: pb.PauseGenerationRequest, context: Context
    ) -> pb.PauseGenerationResponse:
        self._lifecycle.check_open()
        mode = _MODES[request.mode]
        count = await self._updates.with_weights(lambda weights: weights.pause(mode))
        return pb.PauseGenerationResponse(request_count=count)

    async def ContinueGeneration(
        self, request: pb.ContinueGenerationRequest, context: Context
    ) -> pb.ContinueGenerationResponse:
        was_dropped = self._updates.drop()
        await self._updates.with_weights(lambda weights: weights.resume())
        return pb.ContinueGenerationResponse(dropped_update=was_dropped)

    async def BeginWeightUpdate(
        self, request: pb.BeginWeightUpdateRequest, context: Context
    ) -> pb.BeginWeightUpdateResponse:
        self._lifecycle.check_open()
        await self._updates.begin()
        return pb.BeginWeightUpdateResponse()

    async def UpdateWeights(
        self, request: pb.UpdateWeightsRequest, context: Context
    ) -> pb.UpdateWeightsResponse:
        self._lifecycle.check_open()
        updated = await self._updated(request, request.weight_version or None)
        return pb.UpdateWeightsResponse(update=_update(updated))

    async def _updated(
        self, request: pb.UpdateWeightsRequest, version: str | None
    ) -> Updated | None:
        source = request.WhichOneof("source")
        if source == "disk":
            disk = request.disk
            return await self._updates.read(Path(disk.model_path), disk.load_format, version)
        if source == "distributed":
            source_group = request.distributed
            tensors = [
                TensorToCome(tensor.name, tensor.dtype, tuple(tensor.shape))
                for tensor in source_group.tensors
            ]
            return await self._updates.receive(
                source_group.group_name, tensors, version, is_flattened=source_group.is_flattened
            )
        if source == "safetensors":
            return await self._updates.load(request.safetensors, version)
        message = "source is not given; it must be disk, distributed or safetensors"
        raise InvalidArgument.of("WEIGHT_SOURCE_MISSING", "source", message)

    async def EndWeightUpdate(
        self, request: pb.EndWeightUpdateRequest, context: Context
    ) -> pb.EndWeightUpdateResponse:
        self._lifecycle.check_open()
        if request.drop:
            self._updates.drop()
            return pb.EndWeightUpdateResponse()
        updated = await self._updates.end(request.weight_version or None)
        return pb.EndWeightUpdateResponse(update=_update(updated))

    async def InitWeightUpdateGroup(
        self, request: pb.InitWeightUpdateGroupRequest, context: Context
    ) -> pb.InitWeightUpdateGroupResponse:
        self._lifecycle.check_open()
        terms = GroupTerms(
            request.group_name,
            request.master_address,
            request.master_port,
            request.rank_offset,
            request.world_size,
            request.backend or None,
        )
        await self._updates.join(terms)
        return pb.InitWeightUpdateGroupResponse()

    async def DestroyWeightUpdateGroup(
        self, request: pb.DestroyWeightUpdateGroupRequest, context: Context
    ) -> pb.DestroyWeightUpdateGroupResponse:
        await self._updates.leave(request.group_name)
        return pb.DestroyWeightUpdateGroupResponse()

    async def CheckWeights(
        self, request: pb.CheckWeightsRequest, context: Context
    ) -> pb.CheckWeightsResponse:
        action = request.action
        if action == pb.CheckWeightsRequest.ACTION_CHECKSUM:
            checksums = await self._updates.with_weights(lambda weights: weights.checksums())
            return pb.CheckWeightsResponse(checksums=checksums)
        if action == pb.CheckWeightsRequest.ACTION_SNAPSHOT:
            await self._updates.with_weights(lambda weights: weights.snapshot())
        elif action == pb.CheckWeightsRequest.ACTION_COMPARE:
            changed = await self._updates.with_weights(lambda weights: weights.compare())
            return pb.CheckWeightsResponse(changed=changed)
        elif action == pb.CheckWeightsRequest.ACTION_RESET:
            await self._updates.with_weights(lambda weights: weights.reset())
        else:
            message = "action is not given; it must be checksum, snapshot, compare or reset"
            raise InvalidArgument.of("WEIGHT_ACTION_UNKNOWN", "action", message)
        return pb.CheckWeightsResponse()

    async def ReleaseMemory(
        self, request: pb.ReleaseMemoryRequest, context: Context
    ) -> pb.ReleaseMemoryResponse:
        self._lifecycle.check_open()
        tags = _tags(request.tags)
        freed, kept = await self._updates.with_weights(lambda weights: weights.release(tags))
        return pb.ReleaseMemoryResponse(freed_bytes=freed, kept=kept)

    async def ResumeMemory(
        self, request: pb.ResumeMemoryRequest, context: Context
    ) -> pb.ResumeMemoryResponse:
        tags = _tags(request.tags)
        await self._updates.with_weights(lambda weights: weights.reoccupy(tags))
        return pb.ResumeMemoryResponse()


def _update(updated: Updated | None) -> pb.WeightUpdate | None:
    if updated is None:
        return None
    return pb.WeightUpdate(
        weight_version=updated.version,
        retracted_request_count=updated.num_retracted,
        freed_page_count=updated.num_freed_pages,
        pause_duration=duration_message(updated.pause_s),
    )


def _tags(names: Iterable[str]) -> list[MemoryTag]:
    """Returns the tags of these names; all tags if there are no names.

    Raises:
        InvalidArgument: a name is no tag.
    """
    try:
        return [MemoryTag(name) for name in names] or list(MemoryTag)
    except ValueError as error:
        choices = ", ".join(tag.value for tag in MemoryTag)
        message = f"tags holds {error}; each must be one of {choices}"
        raise InvalidArgument.of("MEMORY_TAG_UNKNOWN", "tags", message) from None
