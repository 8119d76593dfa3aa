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
    """A share of the head's pages, for one target at a time.

    Attributes:
        link: link of the target that has the share; None where no target has it.
        worker: runs the head's part of that target's rounds.
        stream: CUDA stream of the share, reused for its targets one after the other.
    """

    pages: tuple[int, ...]
    link: int | None = None
    worker: MappedHeadWorker | None = None
    stream: torch.cuda.Stream | None = None


class MappedHeads:
    """Runs the commands of targets. Each target has an equal share of the head's pages and a CUDA
    stream. Further targets get pushed trees instead. Owned by the engine thread.

    Args:
        deliver: delivers `MappedHeadReady`.
        max_targets: number of targets whose rounds the head takes part in.
        on_span: called with the begin and end of the head's part of each round.
    """

    def __init__(
        self,
        drafter: Drafter,
        deliver: Callable[[Output], None],
        *,
        max_targets: int = 1,
        on_span: OnSpan | None = None,
    ) -> None:
        self._drafter = drafter
        self._deliver, self._max_targets, self._on_span = deliver, max_targets, on_span
        self._shared: SharedHead | None = None
        self._shares: list[_Share] = []

    def apply(self, event: MappedCommandArrived, num_target_ids: int) -> None:
        """Runs a target's command. A command for rounds that could not be opened is dropped.

        Args:
            num_target_ids: number of the target's token ids.
        """
        from shared.runtime.mapped_rounds import MappedRound, OpenMapped

        command = event.command
        if isinstance(command, OpenMapped):
            self._open(event.link, command, num_target_ids)
            return
        share = next((share for share in self._shares if share.link == event.link), None)
        if share is None or share.worker is None:
            return
        if isinstance(command, MappedRound):
            share.worker.take(command)
            return
        try:
            share.worker.prepare(command)
            if not command.is_last:
                return
            share.worker.warm_up()
        except RuntimeError as error:
            self._decline(event.link, str(error))
            return
        self._deliver(MappedHeadReady(event.link, share.pages))

    def close(self, link: int) -> None:
        """Frees the share of a link that has ended."""
        for share in self._shares:
            if share.link == link:
                if share.worker is not None:
                    share.worker.abandon()
                share.link = share.worker = None

    @contextmanager
    def between_rounds(self) -> Iterator[None]:
        """Runs what the body queues, such as new weights, between two rounds of each target."""
        workers = [share.worker for share in self._shares if share.worker is not None]
        for worker in workers:
            worker.hold_caller()
        try:
            yield
        finally:  # what was queued before an error still has to come before the next rounds
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
        if num_ids < num_target_ids:  # the head would read past the end of its embedding
            self._decline(link, f"it has {num_ids} token ids, its target {num_target_ids}")
            return
        try:
            # On the share's stream, so that its rounds follow those of the share's last target.
            worker = MappedHeadWorker(self._shared.model, command, share.stream, self._on_span)
        except (RingUnavailable, RuntimeError) as error:
            self._decline(link, str(error))
            return
        share.link, share.worker, share.stream = link, worker, worker.stream

    def _free_share(self) -> _Share | None:
        """Returns a share that no target has; None where all are taken."""
        if self._shared is None:
            self._shared = self._drafter.share_head()
            assert self._shared is not None, "targets take heads that are offered"
            pages, count = self._shared.pages, len(self._shared.pages) // self._max_targets
            starts = (number * count for number in range(self._max_targets))
            self._shares = [_Share(pages[start : start + count]) for start in starts]
        return next((share for share in self._shares if share.link is None), None)

    def _decline(self, link: int, reason: str) -> None:
        log.warning("no rounds with this head, trees are pushed: %s", reason)
        self.close(link)
        self._deliver(MappedHeadReady(link, ()))
