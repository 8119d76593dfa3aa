"""The engine as other threads see it: a step loop on a thread of its own, behind a bounded inbox.

gRPC and asyncio live on the main thread. They reach the loop through `submit`, `cancel` and the
draft calls, which post commands and never block; events go back through sinks that never block.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from typing import TypeVar

import torch
from torch import Tensor

from services.target.drafts.attachment import Attachment, AttachmentStatus, Offer
from services.target.drafts.feature_store import MAX_LAYERS, FeatureSpec
from services.target.engine_gauges import EngineGauges
from services.target.requests.request import EventSink, GenerationRequest
from services.target.step_loop import StepLoop
from services.target.weight_control import WeightControl
from services.target.weight_stager import RankStages
from shared.candidate_columns import CandidateColumns
from shared.errors import EngineFailed, Unavailable
from shared.inbox import Inbox
from shared.models.heads.target_tensors import Table
from shared.runtime.device import launch_on
from shared.runtime.memory import Shortage, is_shortage
from shared.tokens import NO_REPORT, Candidate, DraftReport, TreeShape

logger = logging.getLogger(__name__)

T = TypeVar("T")


class Engine:
    """Serves requests with one model.

    Args:
        loop: steps on the engine's thread.

    Attributes:
        limits: of the requests that can be served.
        device: of the feature rows.
        page_size: tokens in a page of the KV cache.
        decoder: the model; a draft in this process may borrow its tensors.
        cache: what its KV cache takes of the device.
        num_kv_tokens: that the KV cache holds, on all ranks.
        death: done when the engine thread died of an error.
    """

    def __init__(self, loop: StepLoop, inbox: Inbox) -> None:
        runner, leases = loop.runner, loop.leases
        self.limits, self.device, self.page_size = loop.limits, runner.device, runner.page_size
        self.decoder, self.cache = runner.decoder, runner.cache
        self.num_kv_tokens = leases.num_pages * leases.page_size
        self._inbox = inbox
        self._loop = loop
        self._flush = leases.flush
        self._thread: threading.Thread | None = None
        self._stop = threading.Event()
        self.death: Future[None] = Future()

    # From any thread: requests.

    def submit(self, request: GenerationRequest, sink: EventSink, key: int) -> None:
        """Queues a request; its events go to `sink` under `key`.

        Raises:
            InvalidArgument: the request can never be served.
            QueueFull: the engine is behind. A full admission queue arrives as a `Failed` event.
            EngineFailed: the engine thread died.
            Unavailable: the engine is stopping.
        """
        self.limits.check(request)
        self._inbox.post(lambda: self._loop.submit(request, sink, key))

    def cancel(self, sink: EventSink, key: int) -> None:
        """Ends a request; its pages are free once no step in flight uses them. Unknown
        keys are ignored."""
        self._inbox.post_end(lambda: self._loop.cancel(sink, key))

    # From any thread: drafts.

    def feature_width(self, spec: FeatureSpec) -> int:
        """Returns the width of the rows a spec asks for.

        Raises:
            FailedPrecondition: the target does not have such features.
        """
        config = self.decoder.config
        num_layers, hidden_size = config.num_layers, config.hidden_size
        spec.check(num_layers=num_layers, hidden_size=hidden_size)
        return spec.width(hidden_size)

    @property
    def largest_projection_bytes(self) -> int:
        """Bytes of a draft's largest projection, to one hidden state, at two bytes an element."""
        return 2 * MAX_LAYERS * self.decoder.config.hidden_size**2

    def attach(self, attachment: Attachment) -> None:
        """Adds a draft; running sequences without one are handed to it.

        Raises:
            QueueFull, EngineFailed, Unavailable: as by `submit`.
        """
        self._inbox.post(lambda: self._loop.attach(attachment))

    def map_head(self, attachment_id: str, pages: Sequence[int]) -> None:
        """A draft's head is ready for rounds in mapped memory.

        Args:
            pages: of its KV cache, for the rounds alone; none where it could not prepare.

        Raises:
            QueueFull, EngineFailed, Unavailable: as by `submit`.
        """
        self._inbox.post(lambda: self._loop.drafts.map_head(attachment_id, pages))

    def detach(self, attachment_id: str) -> None:
        """Forgets a draft; its sequences go on without."""
        self._inbox.post_end(lambda: self._loop.drafts.detach(attachment_id))

    def offer(
        self,
        attachment_id: str,
        candidates: CandidateColumns | Iterable[Candidate],
        report: DraftReport = NO_REPORT,
    ) -> None:
        """Takes candidates that a draft pushed, with what it says of itself; a step in progress
        still sees them.

        Raises:
            QueueFull, EngineFailed, Unavailable: as by `submit`.
        """
        columns = CandidateColumns.of(candidates)
        self._loop.drafts.offers.append(Offer(attachment_id, columns, report, self._loop.clock()))
        self._inbox.post(self._loop.drafts.take_offers)

    def release(self, attachment_id: str, sequence_ids: Sequence[int]) -> None:
        """A draft hands sequences back.

        Raises:
            QueueFull, EngineFailed, Unavailable: as by `submit`.
        """
        self._inbox.post(lambda: self._loop.drafts.release(attachment_id, sequence_ids))

    # From any thread: operators.

    @property
    def has_failed(self) -> bool:
        """Whether the engine thread died; nothing will be served any more."""
        return self.death.done()

    @property
    def draft_algorithms(self) -> tuple[str, ...]:
        """Algorithms of the drafts that are attached now, sorted, each once."""
        return self._loop.attachments.drafts.algorithms

    @property
    def speculation_detail(self) -> str:
        """The reason why no trees are verified; empty while they are, or while it is unknown."""
        return self._loop.speculation.detail

    def attachments(self) -> Future[tuple[AttachmentStatus, ...]]:
        """Returns the live drafts, oldest first, with their tree requests."""
        return self._inbox.call(self._loop.statuses)

    def gauges(self) -> Future[EngineGauges]:
        """Returns the live figures."""
        return self._inbox.call(self._loop.gauges)

    def flush_prefix_cache(self) -> Future[int]:
        """Frees every cached page no sequence reads; returns how many."""
        return self._inbox.call(self._flush)

    def between_steps(self, function: Callable[[], None]) -> Future[None]:
        """Calls a function on the engine thread, between two launches of steps.

        Raises:
            QueueFull, EngineFailed, Unavailable: as by `submit`.
        """
        return self._inbox.call(function)

    def with_weights(self, function: Callable[[WeightControl], T]) -> Future[T]:
        """Does something with the weights on the engine thread, between two launches of steps;
        returns the future of the result.

        Raises:
            QueueFull, EngineFailed, Unavailable: as by `submit`.
        """
        return self._inbox.call(lambda: function(self._loop.weights))

    def candidate_shapes(self, base: TreeShape) -> tuple[TreeShape, ...]:
        """Returns the shapes that trees of a draft may be asked for, beside its own."""
        return self._loop.attachments.drafts.candidate_shapes(base)

    @property
    def weight_version(self) -> str:
        """The name of the weights in force."""
        return self._loop.weights.version.name

    def read_table(self, table: Table, dtype: torch.dtype) -> Tensor:
        """Returns a table of the decoder; for whoever follows its weights, see `follow_weights`."""
        return self._loop.weights.table(table, dtype)

    def share_weights(self, ranks: RankStages) -> None:
        """Has the other processes of the model take part in updates; before `start`."""
        self._loop.weights.share(ranks)

    def follow_weights(self, follow: Callable[[], None]) -> None:
        """Has `follow` called after each update of the weights; before `start`."""
        self._loop.weights.followers.append(follow)

    def start(self) -> None:
        """Starts the engine thread."""
        assert self._thread is None
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Ends the engine thread after the step it is in; requests still running fail."""
        self._inbox.close(Unavailable.draining)
        self._stop.set()
        if self._thread is not None:
            self._inbox.post_end(lambda: None)  # wakes it
            self._thread.join()

    # On the engine thread, or by hand where none was started.

    def step(self) -> bool:
        """Runs the commands that wait and one step; returns whether the step did anything."""
        self._inbox.run_all()
        return self._loop.step()

    def gauges_now(self) -> EngineGauges:
        """Returns the live figures."""
        return self._loop.gauges()

    def statuses_now(self) -> tuple[AttachmentStatus, ...]:
        """Returns the live drafts, see `attachments`."""
        return self._loop.statuses()

    def check_idle(self) -> None:
        """Asserts that no page is lost, with nothing running."""
        self._loop.check_idle()

    def _run(self) -> None:
        try:
            launch_on(self.device)
            while not self._stop.is_set():
                # The command that a stop sends to wake the thread may be among those of the step.
                if not self.step() and not self._stop.is_set():
                    self._wait()
            self._inbox.run_all()
            self._loop.fail_all(Unavailable.draining())
        except Exception as error:  # whatever broke, every caller must hear of it
            if isinstance(error, RuntimeError) and is_shortage(error):
                advice = self.cache.advice(Shortage.of(error))
                logger.critical("no memory for a step: %s; or --chunked-prefill-size", advice)
            logger.exception("the engine failed")
            self.death.set_result(None)
            self._inbox.close(EngineFailed.of)
            while not self._runs_rest():
                pass
            self._loop.fail_all(EngineFailed.of())

    def _runs_rest(self) -> bool:
        """Runs the commands that came before a failure; whether none needed what it has broken. One
        that did is done with all the same."""
        try:
            self._inbox.run_all()
        except Exception:
            logger.exception("a command failed behind the engine")
            return False
        return True

    def _wait(self) -> None:
        """Runs the next commands, or prepares for later steps while there are none."""
        patience_s = self._loop.patience_s()
        if patience_s is None and self._loop.runner.prepare_next():
            patience_s = 0.0
        self._inbox.run_all(wait_s=patience_s)
