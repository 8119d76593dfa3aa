"""Updates of a target's weights, from the first call to the last. On the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from services.target.engine import Engine
from services.target.weight_control import Updated, WeightControl
from services.target.weight_stager import GroupTerms, StageCall, TensorToCome, WeightStager
from shared.errors import FailedPrecondition, InvalidArgument
from shared.model_options import LoadFormat

T = TypeVar("T")


class WeightUpdates:
    """One update at a time. Gathering runs beside the steps, applying between two of them.

    Args:
        make_stager: reads which names the served checkpoint has; called once, when it is needed.
    """

    def __init__(self, engine: Engine, make_stager: Callable[[], WeightStager]) -> None:
        self._engine = engine
        self._make_stager = make_stager
        self._made: WeightStager | None = None
        self._is_open = False
        self._version: str | None = None
        self._under_way: str | None = None
        self._tasks: set[asyncio.Task[Any]] = set()

    async def begin(self) -> None:
        """Gathers what comes from now on, until `end`.

        Raises:
            FailedPrecondition: an update was begun before, or is under way.
        """
        with self._alone("begin_weight_update"):
            if self._is_open:
                raise FailedPrecondition(
                    "an update was begun and has not ended; end it, or continue generation, which "
                    "drops it",
                    reason="WEIGHT_UPDATE_OPEN",
                )
            await self._reset()
            self._is_open, self._version = True, None

    async def end(self, version: str | None) -> Updated | None:
        """Applies the gathered tensors; None where that is nothing.

        Raises:
            CheckpointError, FailedPrecondition: see `WeightControl.apply`. The update is dropped.
        """
        with self._alone("end_weight_update"):
            if not self._is_open:
                raise FailedPrecondition(
                    "no update was begun, or it was dropped", reason="WEIGHT_UPDATE_NOT_OPEN"
                )
            self._is_open = False
            if (await self._stager()).stage.is_empty:
                return None
            return await self._kept(self._applied(version or self._version))

    def drop(self) -> bool:
        """Drops an update that has not ended; returns whether there was one.

        Raises:
            FailedPrecondition: tensors are on their way right now.
        """
        with self._alone("an end of the update"):
            was_open, self._is_open = self._is_open, False
            return was_open

    async def read(self, folder: Path, load_format: str, version: str | None) -> Updated | None:
        """Takes a checkpoint.

        Raises:
            CheckpointError: it is not one of the model that is served.
            InvalidArgument: there is no such load format.
        """
        kind = _load_format(load_format)
        return await self._update("update_weights_from_disk", version, "read", folder, kind)

    async def load(self, content: bytes, version: str | None) -> Updated | None:
        """Takes tensors in the format of safetensors; raises see `WeightStager.load`."""
        return await self._update("update_weights_from_tensor", version, "load", content)

    async def receive(
        self,
        group: str,
        tensors: Sequence[TensorToCome],
        version: str | None,
        *,
        is_flattened: bool,
    ) -> Updated | None:
        """Takes tensors that a process of a group sends; raises see `WeightStager.receive`."""
        name = "update_weights_from_distributed"
        return await self._update(
            name, version, "receive", group, tuple(tensors), is_flattened=is_flattened
        )

    async def join(self, terms: GroupTerms) -> None:
        """Joins a group; raises see `WeightStager.join`."""
        with self._alone("init_weights_update_group"):
            stager = await self._stager()
            problem = terms.problem(stager.num_processes)
            if problem is not None:
                raise InvalidArgument.of("WEIGHT_GROUP_RANKS", "rank_offset", problem)
            await self._kept(self._gather("join", terms))

    async def leave(self, group: str) -> None:
        """Leaves a group; raises see `WeightStager.leave`."""
        with self._alone("destroy_weights_update_group"):
            await self._kept(self._gather("leave", group))

    async def _update(
        self, name: str, version: str | None, method: str, *arguments: Any, **options: Any
    ) -> Updated | None:
        with self._alone(name):
            return await self._kept(self._updated(version, method, *arguments, **options))

    async def _updated(
        self, version: str | None, method: str, *arguments: Any, **options: Any
    ) -> Updated | None:
        if not self._is_open:
            await self._reset()
        try:
            await self._gather(method, *arguments, **options)
        except BaseException:
            self._is_open = False  # half of it is here
            raise
        if self._is_open:
            self._version = version or self._version
            return None
        return await self._applied(version)

    async def _applied(self, version: str | None) -> Updated:
        stage = (await self._stager()).stage
        try:
            return await self._with_weights(lambda weights: weights.apply(stage, version))
        finally:
            (await self._stager()).reset()

    async def _gather(self, method: str, *arguments: Any, **options: Any) -> None:
        """Has every process of the model do something with its stager."""
        call = StageCall(method, arguments, options)
        await self._with_weights(lambda weights: weights.gather(call))
        function = getattr(await self._stager(), method)
        await asyncio.to_thread(function, *arguments, **options)

    async def _reset(self) -> None:
        await self._gather("reset")

    async def _stager(self) -> WeightStager:
        if self._made is None:
            self._made = await asyncio.to_thread(self._make_stager)
        return self._made

    async def _with_weights(self, function: Callable[[WeightControl], T]) -> T:
        return await asyncio.wrap_future(self._engine.with_weights(function))

    async def _kept(self, work: Coroutine[Any, Any, T]) -> T:
        """Does all of it, even if the caller hangs up; the next update waits for that."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return await asyncio.shield(task)

    @contextmanager
    def _alone(self, name: str) -> Iterator[None]:
        """Raises: FailedPrecondition: another call is under way."""
        if self._tasks or self._under_way is not None:
            raise FailedPrecondition(
                f"{self._under_way or 'an update'} is under way; {name} has to wait for its end",
                reason="WEIGHT_UPDATE_BUSY",
            )
        self._under_way = name
        try:
            yield
        finally:
            self._under_way = None


def _load_format(name: str) -> LoadFormat:
    try:
        return LoadFormat(name or LoadFormat.AUTO.value)
    except ValueError:
        known = ", ".join(each.value for each in LoadFormat)
        message = f"load_format is {name!r}; it must be one of {known}"
        raise InvalidArgument.of("LOAD_FORMAT_UNKNOWN", "load_format", message) from None
