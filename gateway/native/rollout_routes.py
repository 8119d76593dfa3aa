"""Routes for trainers that use this server for rollouts, with SGLang's paths and bodies.

All of it is done by the targets, at their maintenance ports. With several targets a weight update
is in force on all or on none; or it goes from one to the next.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
from collections.abc import Awaitable, Callable, Sequence
from functools import wraps
from ipaddress import ip_address
from typing import Any, TypeVar

from fastapi import Depends, FastAPI, Request
from starlette.responses import JSONResponse, Response

from gateway.api_keys import check_may_operate
from gateway.failures import Problem
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
from shared.errors import (
    FailedPrecondition,
    InvalidArgument,
    OutriderError,
    PermissionDenied,
)
from shared.rpc.admin_client import TargetAdmin, TensorToCome

T = TypeVar("T")
Reply = dict[str, Any]
Route = Callable[..., Awaitable[Reply]]
Update = Callable[[TargetAdmin], Awaitable[Reply]]
_KEPT_TAG = "cuda_graph"


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
    """Has a route answer as SGLang's do, whether targets did what it asked for or refused."""

    @wraps(route)
    async def handle(**given: Any) -> Response:
        try:
            done = await route(**given)
        except OutriderError as error:
            problem = Problem.of_request(error)
            body = {"success": False, "message": error.message, **problem.openai_body()}
            return JSONResponse(body, problem.status)
        # What answers say of their weights is what targets said when they were last asked.
        await asyncio.gather(*(link.ask_model() for link in gateway.pool.links))
        return JSONResponse({"success": True, "message": "done", **done})

    return handle


class RolloutRoutes:
    """Handlers of the rollout routes. Each takes the body of SGLang's route of the same name."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    async def weight_version(self) -> Reply:
        """Tells which weights are in force."""
        admins = self._gateway.target_admins()
        statuses = await _each(admins, TargetAdmin.status)
        versions = [each.weight_version for each in statuses]
        return {
            "weight_version": versions[0],
            "is_uniform": len(set(versions)) == 1,
            "targets": {
                admin.address: {
                    "weight_version": each.weight_version,
                    "update_count": each.num_updates,
                    "paused": each.pause,
                    "released": each.released,
                }
                for admin, each in zip(admins, statuses, strict=True)
            },
        }

    async def pause_generation(self, body: PauseRequest | None = None) -> Reply:
        """Holds generation."""
        admins = self._gateway.target_admins()
        mode = "abort" if body is None else body.mode
        if mode == "abort":
            # They hold first, and answers end with all that had been drawn.
            await _each(admins, lambda admin: admin.pause("in_place"))
            self._gateway.open_answers.abort(None)
        counts = await _each(admins, lambda admin: admin.pause(mode))
        return {"num_paused_requests": sum(counts)}

    async def continue_generation(self) -> Reply:
        """Lets it go on."""
        dropped = await _each(self._gateway.target_admins(), TargetAdmin.resume)
        return {"dropped_update": any(dropped)}

    async def update_weights_from_disk(self, body: DiskUpdate) -> Reply:
        """Replaces weights by a checkpoint."""
        admins = self._gateway.target_admins()
        folder, version = body.model_path, body.weight_version or ""
        if body.abort_all_requests:
            self._gateway.open_answers.abort(None)

        def update(admin: TargetAdmin) -> Awaitable[Reply]:
            return admin.update_from_folder(folder, body.load_format or "", version)

        if body.rolling:
            return await _rolling(admins, update)
        return await _at_once(admins, update, version)

    async def update_weights_from_tensor(self, body: TensorUpdate) -> Reply:
        """Replaces weights by those in the body."""
        admins, version = self._gateway.target_admins(), body.weight_version or ""
        tensors = _safetensors(body)
        return await _at_once(
            admins, lambda admin: admin.update_from_tensors(tensors, version), version
        )

    async def update_weights_from_distributed(self, body: GroupUpdate) -> Reply:
        """Replaces weights by those that a group sends."""
        admins, version = self._gateway.target_admins(), body.weight_version or ""
        is_flat, sent = _is_flat(body), _sent(body)

        def update(admin: TargetAdmin) -> Awaitable[Reply]:
            return admin.update_from_group(body.group_name, sent, version, is_flat=is_flat)

        return await _at_once(admins, update, version)

    async def begin_weight_update(self, body: UpdateBracket | None = None) -> Reply:
        """Has the updates that follow gathered."""
        admins = self._gateway.target_admins()
        _check_selector(body)
        await _each(admins, TargetAdmin.begin)
        return {}

    async def end_weight_update(self, body: UpdateBracket | None = None) -> Reply:
        """Applies the gathered tensors."""
        admins = self._gateway.target_admins()
        version = "" if body is None else body.weight_version or ""
        _check_selector(body)
        return _by_target(admins, await _each(admins, lambda admin: admin.end(version)))

    async def init_weights_update_group(self, body: InitGroup) -> Reply:
        """Joins a group; each target has the ranks behind those of the one before."""
        admins = self._gateway.target_admins()
        statuses = await _each(admins, TargetAdmin.status)
        ranks, rank = {}, body.rank_offset
        for admin, status in zip(admins, statuses, strict=True):
            ranks[admin.address] = rank
            rank += status.tp_size * status.pp_size

        def join(admin: TargetAdmin) -> Awaitable[None]:
            return admin.join(
                *(body.group_name, body.master_address, body.master_port),
                *(ranks[admin.address], body.world_size, body.backend or ""),
            )

        await _each(admins, join)
        return {}

    async def destroy_weights_update_group(self, body: GroupName) -> Reply:
        """Leaves a group."""
        admins = self._gateway.target_admins()
        await _each(admins, lambda admin: admin.leave(body.group_name))
        return {}

    async def weights_checker(self, body: WeightCheck) -> Reply:
        """Compares checksums."""
        admins = self._gateway.target_admins()
        found = await _each(admins, lambda admin: admin.check(body.action))
        changed = {
            admin.address: names for admin, (_, names) in zip(admins, found, strict=True) if names
        }
        if changed:
            message = f"tensors differ from the snapshot: {changed}"
            raise FailedPrecondition(message, reason="WEIGHTS_CHANGED")
        checksums = [sums for sums, _ in found]
        return {"checksums": checksums} if any(checksums) else {}

    async def release_memory_occupation(self, body: MemoryTags | None = None) -> Reply:
        """Frees memory while nothing runs."""
        admins, (tags, kept) = self._gateway.target_admins(), _tags(body)
        if not tags and kept:
            return {"freed_bytes": 0, "kept": kept}
        found = await _each(admins, lambda admin: admin.release(tags))
        for admin, (_, reasons) in zip(admins, found, strict=True):
            kept += [f"{admin.address} {reason}" for reason in reasons]
        return {"freed_bytes": sum(num_bytes for num_bytes, _ in found), "kept": kept}

    async def resume_memory_occupation(self, body: MemoryTags | None = None) -> Reply:
        """Takes it again."""
        admins, (tags, kept) = self._gateway.target_admins(), _tags(body)
        if tags or not kept:
            await _each(admins, lambda admin: admin.reoccupy(tags))
        return {}


def check_may_change_weights(request: Request, gateway: Gateway) -> None:
    """Raises:
    PermissionDenied: the client is no operator, or of another host while that is not allowed.
    """
    check_may_operate("change weights or hold generation")
    host = "" if request.client is None else request.client.host
    if gateway.settings.remote_operators or _is_local(host):
        return
    raise PermissionDenied(
        f"weights are changed and generation is held from this host only, and {host} is another; "
        f"start the gateway with --remote-operators and --api-key-file",
        reason="OPERATOR_REMOTE",
    )


def _is_local(host: str) -> bool:
    """A socket of the file system has no host."""
    try:
        return not host or ip_address(host).is_loopback
    except ValueError:
        return False


async def _settled(
    admins: Sequence[TargetAdmin], call: Callable[[TargetAdmin], Awaitable[T]]
) -> list[T | OutriderError]:
    """Calls all targets at once, waits for all of them, and returns what each answers."""

    async def one(admin: TargetAdmin) -> T | OutriderError:
        try:
            return await call(admin)
        except OutriderError as error:
            if len(admins) > 1:
                error.message = f"{admin.address}: {error.message}"
            return error

    return await asyncio.gather(*map(one, admins))


async def _each(
    admins: Sequence[TargetAdmin], call: Callable[[TargetAdmin], Awaitable[T]]
) -> list[T]:
    """Does what `_settled` does.

    Raises:
        OutriderError: that of the first that refused.
    """
    found: list[T] = []
    for result in await _settled(admins, call):
        if isinstance(result, OutriderError):
            raise result
        found.append(result)
    return found


async def _at_once(admins: list[TargetAdmin], update: Update, version: str) -> Reply:
    """Updates all targets or none: they gather first, and then all of them apply."""
    if len(admins) == 1:
        return await update(admins[0])
    begun = await _settled(admins, TargetAdmin.begin)
    refusals = [each for each in begun if isinstance(each, OutriderError)]
    if len(refusals) == len(admins) and all(r.reason == "WEIGHT_UPDATE_OPEN" for r in refusals):
        # The client has begun it, and ends it.
        return _by_target(admins, await _each(admins, update))
    own = [admin for admin, each in zip(admins, begun, strict=True) if each is None]
    try:
        if refusals:
            raise refusals[0]
        await _each(admins, update)
    except OutriderError:
        await _settled(own, lambda admin: admin.end("", drop=True))
        raise
    return _by_target(admins, await _each(admins, lambda admin: admin.end(version)))


async def _rolling(admins: list[TargetAdmin], update: Update) -> Reply:
    """Updates one target after the other; the others serve meanwhile."""
    done: list[Reply] = []
    for admin in admins:
        was_paused = (await admin.status()).pause is not None
        if not was_paused:
            await admin.pause("retract")
        try:
            done.append(await update(admin))
        finally:
            if not was_paused:
                await admin.resume()
    return _by_target(admins, done)


def _by_target(admins: Sequence[TargetAdmin], done: Sequence[Reply]) -> Reply:
    found = {admin.address: each for admin, each in zip(admins, done, strict=True) if each}
    if not found:
        return {}
    return {**next(iter(found.values())), "targets": found}


def _safetensors(body: TensorUpdate) -> bytes:
    """Raises: InvalidArgument: the tensors are pickled, or not one part for all processes."""
    parts = body.serialized_named_tensors
    if body.load_format != "safetensors":
        given = body.load_format or "null"
        message = (
            f"load_format is {given}: pickled tensors are refused, since reading them runs code; "
            f"send one base64 text of the format of safetensors with load_format safetensors"
        )
        raise InvalidArgument.of("WEIGHTS_PICKLED", "load_format", message)
    if len(set(parts)) != 1:
        message = f"serialized_named_tensors holds {len(parts)} texts; one is for all processes"
        raise InvalidArgument.of("WEIGHT_PARTS_DIFFER", "serialized_named_tensors", message)
    try:
        return base64.b64decode(parts[0], validate=True)
    except binascii.Error as error:
        message = f"serialized_named_tensors is not base64: {error}"
        field = "serialized_named_tensors"
        raise InvalidArgument.of("WEIGHTS_NOT_BASE64", field, message) from error


def _sent(body: GroupUpdate) -> list[TensorToCome]:
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
    """Returns the tags for targets, and the tags whose memory is always kept."""
    given = [] if body is None else body.tags or []
    kept = [f"{_KEPT_TAG}: graphs stay captured"] if _KEPT_TAG in given else []
    return [tag for tag in given if tag != _KEPT_TAG], kept
