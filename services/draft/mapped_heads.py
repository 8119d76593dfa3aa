"""The draft's head in rounds of a target on this host; see `shared.runtime.mapped_rounds`."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from services.draft.drafters.drafter import Drafter, SharedHead
from services.draft.events import MappedCommandArrived, MappedHeadReady, Output

if TYPE_CHECKING:
    # A worker without a model runs where torch is not installed.
    import torch

    from shared.runtime.mapped_head_worker import MappedHeadWorker
    from shared.runtime.mapped_rounds import OpenMapped
    from shared.runtime.stream_times import OnSpan

log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Share:
    """A target's part of the head.

    Attributes:
        link: of the target that has it; None where nobody has.
        worker: runs its rounds.
        stream: of the GPU, for all who have it, one after the other.
    """

    pages: tuple[int, ...]
    link: int | None = None
    worker: MappedHeadWorker | None = None
    stream: torch.cuda.Stream | None = None


class MappedHeads:
    """Takes the commands of targets, which have equal shares of the head's pages, and a stream of
    the GPU each. Targets beyond as many are pushed trees. Owned by the engine thread.

    Args:
        deliver: says that the head is ready.
        most: targets that take part.
        on_span: hears when the head's parts of rounds began and ended.
    """

    def __init__(
        self,
        drafter: Drafter,
        deliver: Callable[[Output], None],
        *,
        most: int = 1,
        on_span: OnSpan | None = None,
    ) -> None:
        self._drafter = drafter
        self._deliver, self._most, self._on_span = deliver, most, on_span
        self._shared: SharedHead | None = None
        self._shares: list[_Share] = []

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
        share = next((each for each in self._shares if each.link == event.link), None)
        if share is None or share.worker is None:
            return
        if isinstance(command, MappedRound):
            share.worker.take(command)
            return
        try:
            share.worker.prepare(command)
            if not command.is_last:
                return
            share.worker.warm_up(share.pages)
        except RuntimeError as error:
            self._decline(event.link, str(error))
            return
        self._deliver(MappedHeadReady(event.link, share.pages))

    def close(self, link: int) -> None:
        """A link has ended."""
        for each in self._shares:
            if each.link == link:
                if each.worker is not None:
                    each.worker.abandon()
                each.link = each.worker = None

    @contextmanager
    def between_rounds(self) -> Iterator[None]:
        """What its body queues, such as other weights, comes between two rounds of each target."""
        workers = [each.worker for each in self._shares if each.worker is not None]
        for worker in workers:
            worker.hold_caller()
        yield
        for worker in workers:
            worker.wait_for_caller()

    def _open(self, link: int, command: OpenMapped, num_target_ids: int) -> None:
        from shared.runtime.mapped_head_worker import MappedHeadWorker
        from shared.runtime.ring_memory import RingUnavailable

        share = self._free_share()
        if share is None or self._shared is None:
            self._deliver(MappedHeadReady(link, ()))
            return
        num_ids = self._shared.model.id_limit
        if num_ids < num_target_ids:  # it would look tokens up past the end of its embedding
            self._decline(link, f"it has {num_ids} token ids, its target {num_target_ids}")
            return
        try:
            # Its rounds come behind those of the target that had the pages before.
            worker = MappedHeadWorker(self._shared.model, command, share.stream, self._on_span)
        except (RingUnavailable, RuntimeError) as error:
            self._decline(link, str(error))
            return
        share.link, share.worker, share.stream = link, worker, worker.stream

    def _free_share(self) -> _Share | None:
        """Returns a part of the head that no target has; None where there is none."""
        if self._shared is None:
            self._shared = self._drafter.share_head()
            assert self._shared is not None, "targets take heads that are offered"
            pages, count = self._shared.pages, len(self._shared.pages) // self._most
            starts = (number * count for number in range(self._most))
            self._shares = [_Share(pages[start : start + count]) for start in starts]
        return next((each for each in self._shares if each.link is None), None)

    def _decline(self, link: int, reason: str) -> None:
        log.warning("no rounds with this head, trees are pushed: %s", reason)
        self.close(link)
        self._deliver(MappedHeadReady(link, ()))
