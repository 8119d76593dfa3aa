"""Routes for trainers that use this server for rollouts, with SGLang's paths and bodies.

The targets do the work, through their maintenance ports. With several targets a weight update
takes effect on all of them or on none; a rolling update goes from one target to the next.
"""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Awaitable, Callable, Sequence
from functools import wraps
from typing import Any, TypeVar

from fastapi import Depends, FastAPI, Request
from starlette.responses import JSONResponse, Response

from gateway.api_keys import check_may_operate
from gateway.failures import json_response, refused_by_target
from gateway.native.schema import (
    DiskUpdate,
    GroupName,
    GroupUpdate,
    InitGroup,
    MemoryTags,
    PauseRequest,
    TensorUpdate,
    UpdateBracket,
    WeightCheck,
)
from gateway.serving import Gateway
from shared.errors import FailedPrecondition, InvalidArgument, OutriderError, PermissionDenied
from shared.rpc.admin_client import TargetAdmin, TensorToCome
from shared.settings import is_loopback

T = TypeVar("T")
Reply = dict[str, Any]
Route = Callable[..., Awaitable[Reply]]
Update = Callable[[TargetAdmin], Awaitable[Reply]]
_NEVER_RELEASED_TAG = "cuda_graph"


def add_rollout_routes(app: FastAPI, gateway: Gateway) -> None:
    """Adds the routes."""
    routes = RolloutRoutes(gateway)
    for path in ("/get_weight_version", "/weight_version"):
        app.get(path, tags=["rollouts"])(routes.weight_version)

    async def check(request: Request) -> None:
        check_may_change_weights(request, gateway)

    for route in (
        *(routes.pause_generation, routes.continue_generation),
        *(routes.update_weights_from_disk, routes.update_weights_from_tensor),
        *(routes.init_weights_update_group, routes.destroy_weights_update_group),
        *(routes.update_weights_from_distributed, routes.weights_checker),
        *(routes.begin_weight_update, routes.end_weight_update),
        *(routes.release_memory_occupation, routes.resume_memory_occupation),
    ):
        add = app.post(
            f"/{route.__name__}",
            tags=["rollouts"],
            dependencies=[Depends(check)],
            response_class=JSONResponse,
            response_model=None,
        )
        add(_answered(route, gateway))


def _answered(route: Route, gateway: Gateway) -> Callable[..., Awaitable[Response]]:
    """Wraps a route: its answers, and its refusals by targets, have the shape of SGLang's."""

    @wraps(route)
    async def handle(**arguments: Any) -> Response:
        try:
            reply = await route(**arguments)
        except OutriderError as error:
            return refused_by_target(error)
        # Later answers report the weight version that each target states here.
        await asyncio.gather(*(link.ask_model() for link in gateway.pool.links))
        return json_response({"success": True, "message": "done", **reply})

    return handle


class RolloutRoutes:
    """Handlers of the rollout routes. Each takes the body of SGLang's route of the same name."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    async def weight_version(self) -> Reply:
        """Returns the version of the weights in use."""
        admins = self._gateway.target_admins()
        statuses = await _call_all(admins, TargetAdmin.status)
        versions = [status.weight_version for status in statuses]
        return {
            "weight_version": versions[0],
            "is_uniform": len(set(versions)) == 1,
            "targets": {
                admin.address: {
                    "weight_version": status.weight_version,
                    "update_count": status.num_updates,
                    "paused": status.pause,
                    "released": status.released,
                }
                for admin, status in zip(admins, statuses, strict=True)
            },
        }

    async def pause_generation(self, body: PauseRequest | None = None) -> Reply:
        """Pauses generation."""
        admins = self._gateway.target_admins()
        mode = "abort" if body is None else body.mode
        if mode == "abort":
            # Pause before aborting, so that answers end with all tokens that were drawn.
            await _call_all(admins, lambda admin: admin.pause("in_place"))
            self._gateway.abort(None)
        counts = await _call_all(admins, lambda admin: admin.pause(mode))
        return {"num_paused_requests": sum(counts)}

    async def continue_generation(self) -> Reply:
        """Resumes generation."""
        dropped = await _call_all(self._gateway.target_admins(), TargetAdmin.resume)
        return {"dropped_update": any(dropped)}

    async def update_weights_from_disk(self, body: DiskUpdate) -> Reply:
        """Loads new weights from a checkpoint."""
        admins = self._gateway.target_admins()
        folder, version = body.model_path, body.weight_version or ""
        if body.abort_all_requests:
            self._gateway.abort(None)

        def update(admin: TargetAdmin) -> Awaitable[Reply]:
            return admin.update_from_folder(folder, body.load_format or "", version)

        if body.rolling:
            return await _update_rolling(admins, update)
        return await _update_all(admins, update, version)

    async def update_weights_from_tensor(self, body: TensorUpdate) -> Reply:
        """Loads new weights from the body."""
        admins, version = self._gateway.target_admins(), body.weight_version or ""
        tensors = _safetensors(body)
        return await _update_all(
            admins, lambda admin: admin.update_from_tensors(tensors, version), version
        )

    async def update_weights_from_distributed(self, body: GroupUpdate) -> Reply:
        """Loads new weights that a process group sends."""
        admins, version = self._gateway.target_admins(), body.weight_version or ""
        is_flat, tensors = _is_flat(body), _announced_tensors(body)

        def update(admin: TargetAdmin) -> Awaitable[Reply]:
            return admin.update_from_group(body.group_name, tensors, version, is_flat=is_flat)

        return await _update_all(admins, update, version)

    async def begin_weight_update(self, body: UpdateBracket | None = None) -> Reply:
        """Begins an update: later calls only collect tensors, until the update ends."""
        admins = self._gateway.target_admins()
        _check_selector(body)
        await _call_all(admins, TargetAdmin.begin)
        return {}

    async def end_weight_update(self, body: UpdateBracket | None = None) -> Reply:
        """Ends an update: applies the collected tensors."""
        admins = self._gateway.target_admins()
        version = "" if body is None else body.weight_version or ""
        _check_selector(body)
        return _by_target(admins, await _call_all(admins, lambda admin: admin.end(version)))

    async def init_weights_update_group(self, body: InitGroup) -> Reply:
        """Joins a process group. Targets take consecutive ranks, from `rank_offset` on."""
        admins = self._gateway.target_admins()
        statuses = await _call_all(admins, TargetAdmin.status)
        ranks, rank = {}, body.rank_offset
        for admin, status in zip(admins, statuses, strict=True):
            ranks[admin.address] = rank
            rank += status.tp_size * status.pp_size

        def join(admin: TargetAdmin) -> Awaitable[None]:
            return admin.join(
                *(body.group_name, body.master_address, body.master_port),
                *(ranks[admin.address], body.world_size, body.backend or ""),
            )

        await _call_all(admins, join)
        return {}

    async def destroy_weights_update_group(self, body: GroupName) -> Reply:
        """Leaves a process group."""
        admins = self._gateway.target_admins()
        await _call_all(admins, lambda admin: admin.leave(body.group_name))
        return {}

    async def weights_checker(self, body: WeightCheck) -> Reply:
        """Returns checksums of the weights, or compares them with a snapshot."""
        admins = self._gateway.target_admins()
        results = await _call_all(admins, lambda admin: admin.check(body.action))
        changed = {
            admin.address: names for admin, (_, names) in zip(admins, results, strict=True) if names
        }
        if changed:
            message = f"tensors differ from the snapshot: {changed}"
            raise FailedPrecondition(message, reason="WEIGHTS_CHANGED")
        checksums = [sums for sums, _ in results]
        return {"checksums": checksums} if any(checksums) else {}

    async def release_memory_occupation(self, body: MemoryTags | None = None) -> Reply:
        """Frees memory of weights or KV cache; no request may run."""
        admins, (tags, kept) = self._gateway.target_admins(), _tags(body)
        if not tags and kept:
            return {"freed_bytes": 0, "kept": kept}
        results = await _call_all(admins, lambda admin: admin.release(tags))
        for admin, (_, reasons) in zip(admins, results, strict=True):
            kept += [f"{admin.address} {reason}" for reason in reasons]
        return {"freed_bytes": sum(num_bytes for num_bytes, _ in results), "kept": kept}

    async def resume_memory_occupation(self, body: MemoryTags | None = None) -> Reply:
        """Takes released memory again."""
        admins, (tags, kept) = self._gateway.target_admins(), _tags(body)
        if tags or not kept:
            await _call_all(admins, lambda admin: admin.reoccupy(tags))
        return {}


def check_may_change_weights(request: Request, gateway: Gateway) -> None:
    """Checks that a client may change weights and pause generation.

    Raises:
        PermissionDenied: the client is no operator, or is on another host without
            `--remote-operators`.
    """
    check_may_operate("change weights or hold generation")
    host = "" if request.client is None else request.client.host
    if gateway.settings.remote_operators or is_loopback(host):
        return
    raise PermissionDenied(
        f"weights are changed and generation is held from this host only, and {host} is another; "
        f"start the gateway with --remote-operators and --api-key-file",
        reason="OPERATOR_REMOTE",
    )


async def _call_all_settled(
    admins: Sequence[TargetAdmin], call: Callable[[TargetAdmin], Awaitable[T]]
) -> list[T | OutriderError]:
    """Calls all targets at once, waits for all of them, and returns each one's answer or error."""

    async def call_one(admin: TargetAdmin) -> T | OutriderError:
        try:
            return await call(admin)
        except OutriderError as error:
            if len(admins) > 1:
                error.message = f"{admin.address}: {error.message}"
            return error

    return await asyncio.gather(*map(call_one, admins))


async def _call_all(
    admins: Sequence[TargetAdmin], call: Callable[[TargetAdmin], Awaitable[T]]
) -> list[T]:
    """Calls all targets at once, waits for all of them, and returns their answers.

    Raises:
        OutriderError: the error of the first target, in order, that refused.
    """
    answers: list[T] = []
    for answer in await _call_all_settled(admins, call):
        if isinstance(answer, OutriderError):
            raise answer
        answers.append(answer)
    return answers


async def _update_all(admins: list[TargetAdmin], update: Update, version: str) -> Reply:
    """Updates all targets or none: all collect the tensors first, then all apply them."""
    if len(admins) == 1:
        return await update(admins[0])
    begun = await _call_all_settled(admins, TargetAdmin.begin)
    refusals = [answer for answer in begun if isinstance(answer, OutriderError)]
    if len(refusals) == len(admins) and all(r.reason == "WEIGHT_UPDATE_OPEN" for r in refusals):
        # The client has begun the update itself, and will end it.
        return _by_target(admins, await _call_all(admins, update))
    begun_here = [admin for admin, answer in zip(admins, begun, strict=True) if answer is None]
    try:
        if refusals:
            raise refusals[0]
        await _call_all(admins, update)
    except OutriderError:
        await _call_all_settled(begun_here, lambda admin: admin.end("", drop=True))
        raise
    return _by_target(admins, await _call_all(admins, lambda admin: admin.end(version)))


async def _update_rolling(admins: list[TargetAdmin], update: Update) -> Reply:
    """Updates one target after the other, while the rest keep serving."""
    replies: list[Reply] = []
    for admin in admins:
        was_paused = (await admin.status()).pause is not None
        if not was_paused:
            await admin.pause("retract")
        try:
            replies.append(await update(admin))
        finally:
            if not was_paused:
                await admin.resume()
    return _by_target(admins, replies)


def _by_target(admins: Sequence[TargetAdmin], replies: Sequence[Reply]) -> Reply:
    """Returns the first target's reply, and under `targets` the replies of all of them."""
    targets = {admin.address: reply for admin, reply in zip(admins, replies, strict=True) if reply}
    if not targets:
        return {}
    return {**next(iter(targets.values())), "targets": targets}


def _safetensors(body: TensorUpdate) -> bytes:
    """Returns the tensors of a body, in the format of safetensors.

    Raises:
        InvalidArgument: the tensors are pickled, not base64, or differ between processes.
    """
    field, parts = "serialized_named_tensors", body.serialized_named_tensors
    if body.load_format != "safetensors":
        load_format = body.load_format or "null"
        message = (
            f"load_format is {load_format}: pickled tensors are refused, since reading them runs "
            f"code; send one base64 text of the format of safetensors with load_format safetensors"
        )
        raise InvalidArgument.of("WEIGHTS_PICKLED", "load_format", message)
    if len(set(parts)) != 1:
        message = f"{field} holds {len(parts)} texts; one is for all processes"
        raise InvalidArgument.of("WEIGHT_PARTS_DIFFER", field, message)
    try:
        return base64.b64decode(parts[0], validate=True)
    except ValueError as error:
        message = f"{field} is not base64: {error}"
        raise InvalidArgument.of("WEIGHTS_NOT_BASE64", field, message) from error


def _announced_tensors(body: GroupUpdate) -> list[TensorToCome]:
    counts = {len(body.names), len(body.dtypes), len(body.shapes)}
    if len(counts) != 1:
        message = (
            f"names, dtypes and shapes have {len(body.names)}, {len(body.dtypes)} and "
            f"{len(body.shapes)} entries; each tensor needs one of each"
        )
        raise InvalidArgument.of("WEIGHT_LISTS_DIFFER", "names", message)
    return list(zip(body.names, body.dtypes, body.shapes, strict=True))


def _is_flat(body: GroupUpdate) -> bool:
    if body.load_format not in (None, "flattened_bucket"):
        message = f"load_format is {body.load_format!r}; it must be flattened_bucket or null"
        raise InvalidArgument.of("LOAD_FORMAT_UNKNOWN", "load_format", message)
    return body.load_format is not None


def _check_selector(body: UpdateBracket | None) -> None:
    selector = "all" if body is None else body.selector or "all"
    if selector == "draft":
        message = "selector is draft; a draft's weights are replaced by its UpdateDraftWeights"
        raise InvalidArgument.of("WEIGHT_SELECTOR_DRAFT", "selector", message)
    if selector not in ("all", "target"):
        message = f"selector is {selector!r}; it must be target or all"
        raise InvalidArgument.of("WEIGHT_SELECTOR_UNKNOWN", "selector", message)


def _tags(body: MemoryTags | None) -> tuple[list[str], list[str]]:
    """Returns the tags for the targets, and notes on the tags whose memory is never released."""
    tags = [] if body is None else body.tags or []
    is_kept = _NEVER_RELEASED_TAG in tags
    kept = [f"{_NEVER_RELEASED_TAG}: graphs stay captured"] if is_kept else []
    return [tag for tag in tags if tag != _NEVER_RELEASED_TAG], kept
