"""The draft's head in rounds of a target on this host; see `shared.runtime.mapped_rounds`."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from services.draft.events import MappedCommandArrived, MappedHeadReady, Output

if TYPE_CHECKING:
    # A worker without a model runs where torch is not installed.
    from services.draft.drafters.shared_head import SharedHead
    from shared.runtime.mapped_head_worker import MappedHeadWorker
    from shared.runtime.mapped_rounds import OpenMapped

log = logging.getLogger(__name__)


@runtime_checkable
class SharesHead(Protocol):
    """A drafter whose head rounds of a target can use."""

    def share_head(self) -> SharedHead: ...


@dataclass(slots=True)
class _Link:
    """Rounds of one target."""

    number: int
    worker: MappedHeadWorker


class MappedHeads:
    """Takes the commands of a target. For one target at a time; others are pushed trees. Owned by
    the engine thread.

    Args:
        deliver: says that the head is ready.
    """

    def __init__(self, drafter: object, deliver: Callable[[Output], None]) -> None:
        self._drafter = drafter if isinstance(drafter, SharesHead) else None
        self._deliver = deliver
        self._shared: SharedHead | None = None
        self._link: _Link | None = None

    def take(self, event: MappedCommandArrived, num_target_ids: int) -> None:
        """Does what a target asks for; a command of rounds that could not be opened is dropped.

        Args:
            num_target_ids: token ids of the target are below it.
        """
        from shared.runtime.mapped_rounds import MappedRound, OpenMapped

        command = event.command
        if isinstance(command, OpenMapped):
            self._open(event.link, command, num_target_ids)
            return
        if self._link is None or self._link.number != event.link:
            return
        if isinstance(command, MappedRound):
            self._link.worker.take(command)
            return
        try:
            self._link.worker.prepare(command)
            if not command.is_last:
                return
            assert self._shared is not None
            self._link.worker.warm_up(self._shared.pages)
        except RuntimeError as error:
            self._decline(event.link, str(error))
            return
        self._deliver(MappedHeadReady(event.link, self._shared.pages))

    def close(self, link: int) -> None:
        """A link has ended."""
        if self._link is not None and self._link.number == link:
            self._link = None

    def _open(self, link: int, command: OpenMapped, num_target_ids: int) -> None:
        from shared.runtime.mapped_head_worker import MappedHeadWorker
        from shared.runtime.ring_memory import RingUnavailable

        if self._drafter is None or self._link is not None:
            self._deliver(MappedHeadReady(link, ()))
            return
        if self._shared is None:
            self._shared = self._drafter.share_head()
        num_ids = self._shared.model.id_limit
        if num_ids < num_target_ids:  # it would look tokens up past the end of its embedding
            self._decline(link, f"it has {num_ids} token ids, its target {num_target_ids}")
            return
        try:
            worker = MappedHeadWorker(self._shared.model, command)
        except (RingUnavailable, RuntimeError) as error:
            self._decline(link, str(error))
            return
        self._link = _Link(link, worker)

    def _decline(self, link: int, reason: str) -> None:
        log.warning("no rounds with this head, trees are pushed: %s", reason)
        self._link = None
        self._deliver(MappedHeadReady(link, ()))
