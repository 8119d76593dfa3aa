"""The calls of a weight update, one after the other. Runs on the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from functools import wraps
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

from services.target.engine import Engine
from services.target.weight_control import Updated, WeightControl
from services.target.weight_stager import GroupTerms, RankCall, TensorToCome, WeightStager
from shared.errors import FailedPrecondition, InvalidArgument
from shared.model_options import LoadFormat

P = ParamSpec("P")
T = TypeVar("T")


def _alone(
    name: str,
) -> Callable[
    [Callable[Concatenate[WeightUpdates, P], Coroutine[Any, Any, T]]],
    Callable[Concatenate[WeightUpdates, P], Awaitable[T]],
]:
    """Decorates a method: it finishes even if the caller hangs up; other calls are refused until
    then."""

    def decorate(
        method: Callable[Concatenate[WeightUpdates, P], Coroutine[Any, Any, T]],
    ) -> Callable[Concatenate[WeightUpdates, P], Awaitable[T]]:
        @wraps(method)
        async def call(self: WeightUpdates, /, *args: P.args, **kwargs: P.kwargs) -> T:
            self.check_free(name)
            task = asyncio.create_task(method(self, *args, **kwargs), name=name)
            self.under_way = task
            return await asyncio.shield(task)

        return call

    return decorate


class WeightUpdates:
    """Runs one update at a time. Tensors are gathered beside the steps and applied between two
    steps. Each method raises `FailedPrecondition` while another one runs.

    Args:
        make_stager: makes the stager, which reads the checkpoint's tensor names; called once, when
            needed.

    Attributes:
        under_way: the task of the last call.
    """

    def __init__(self, engine: Engine, make_stager: Callable[[], WeightStager]) -> None:
        self.under_way: asyncio.Task[Any] | None = None
        self._engine = engine
        self._make_stager = make_stager
        self._stager: WeightStager | None = None
        self._is_open = False
        self._version: str | None = None

    def check_free(self, name: str) -> None:
        """Raises: FailedPrecondition: another call is under way."""
        if self.under_way is not None and not self.under_way.done():
            raise FailedPrecondition(
                f"{self.under_way.get_name()} is under way; {name} has to wait for its end",
                reason="WEIGHT_UPDATE_BUSY",
            )

    @_alone("begin_weight_update")
    async def begin(self) -> None:
        """Opens an update: tensors are gathered until `end`.

        Raises:
            FailedPrecondition: an update was begun before.
        """
        if self._is_open:
            raise FailedPrecondition(
                "an update was begun and has not ended; end it, or continue generation, which "
                "drops it",
                reason="WEIGHT_UPDATE_OPEN",
            )
        await self._gather("reset")
        self._is_open, self._version = True, None

    @_alone("end_weight_update")
    async def end(self, version: str | None) -> Updated | None:
        """Applies the gathered tensors; returns None where there are none.

        Raises:
            CheckpointError, FailedPrecondition: see `WeightControl.apply`. The update is dropped.
        """
        if not self._is_open:
            raise FailedPrecondition(
                "no update was begun, or it was dropped", reason="WEIGHT_UPDATE_NOT_OPEN"
            )
        self._is_open = False
        if (await self._made_stager()).stage.is_empty:
            return None
        return await self._applied(version or self._version)

    def drop(self) -> bool:
        """Drops an open update; returns whether there was one.

        Raises:
            FailedPrecondition: a call is running.
        """
        self.check_free("an end of the update")
        was_open, self._is_open = self._is_open, False
        return was_open

    @_alone("update_weights_from_disk")
    async def read(self, folder: Path, load_format: str, version: str | None) -> Updated | None:
        """Takes the tensors of a checkpoint.

        Raises:
            CheckpointError: it is no checkpoint of the served model.
            InvalidArgument: there is no such load format.
        """
        return await self._update(version, "read", folder, _load_format(load_format))

    @_alone("update_weights_from_tensor")
    async def load(self, content: bytes, version: str | None) -> Updated | None:
        """Takes tensors in the format of safetensors. Raises: see `WeightStager.load`."""
        return await self._update(version, "load", content)

    @_alone("update_weights_from_distributed")
    async def receive(
        self,
        group: str,
        tensors: Sequence[TensorToCome],
        version: str | None,
        *,
        is_flattened: bool,
    ) -> Updated | None:
        """Takes tensors that rank 0 of a group sends. Raises: see `WeightStager.receive`."""
        return await self._update(
            version, "receive", group, tuple(tensors), is_flattened=is_flattened
        )

    @_alone("init_weights_update_group")
    async def join(self, terms: GroupTerms) -> None:
        """Joins a group. Raises: see `WeightStager.join`."""
        problem = terms.problem((await self._made_stager()).num_processes)
        if problem is not None:
            raise InvalidArgument.of("WEIGHT_GROUP_RANKS", "rank_offset", problem)
        await self._gather("join", terms)

    @_alone("destroy_weights_update_group")
    async def leave(self, group: str) -> None:
        """Leaves a group. Raises: see `WeightStager.leave`."""
        await self._gather("leave", group)

    async def with_weights(self, function: Callable[[WeightControl], T]) -> T:
        """Calls a function with the weight control between two steps, also during an update."""
        return await asyncio.wrap_future(self._engine.with_weights(function))

    async def _update(
        self, version: str | None, method: str, *arguments: Any, **options: Any
    ) -> Updated | None:
        if not self._is_open:
            await self._gather("reset")
        try:
            await self._gather(method, *arguments, **options)
        except BaseException:
            self._is_open = False  # part of its tensors is missing
            raise
        if self._is_open:
            self._version = version or self._version
            return None
        return await self._applied(version)

    async def _applied(self, version: str | None) -> Updated:
        stager = await self._made_stager()
        try:
            return await self.with_weights(lambda weights: weights.apply(stager.stage, version))
        finally:
            stager.reset()

    async def _gather(self, method: str, *arguments: Any, **options: Any) -> None:
        """Has every rank of the model call a method of its stager."""
        call = RankCall(method, arguments, options)
        await self.with_weights(lambda weights: weights.gather(call))
        await asyncio.to_thread(call.on, await self._made_stager())

    async def _made_stager(self) -> WeightStager:
        if self._stager is None:
            self._stager = await asyncio.to_thread(self._make_stager)
        return self._stager


def _load_format(name: str) -> LoadFormat:
    try:
        return LoadFormat(name or LoadFormat.AUTO.value)
    except ValueError:
        choices = ", ".join(choice.value for choice in LoadFormat)
        message = f"load_format is {name!r}; it must be one of {choices}"
        raise InvalidArgument.of("LOAD_FORMAT_UNKNOWN", "load_format", message) from None
