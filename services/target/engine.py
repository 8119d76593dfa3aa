"""The engine: a step loop on its own thread, which other threads reach through a bounded inbox.

gRPC and asyncio live on the main thread. They reach the loop through `submit`, `cancel` and the
draft calls, which post commands and never block; events go back through sinks that never block.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import TypeVar

import torch
from torch import Tensor

from services.target.drafts.attachment import Attachment, AttachmentStatus, Offer
from services.target.drafts.feature_store import MAX_LAYERS, FeatureSpec
from services.target.requests.request import EventSink, GenerationRequest
from services.target.step_loop import StepLoop
from services.target.step_report import EngineGauges
from services.target.weight_control import WeightControl
from services.target.weight_stager import RankStages
from shared.candidate_columns import CandidateColumns
from shared.errors import EngineFailed, Unavailable
from shared.inbox import Inbox
from shared.models.heads.target_tensors import Table
from shared.runtime.device import launch_on
from shared.runtime.memory import Shortage, is_shortage
from shared.tokens import NO_REPORT, DraftReport, TreeShape

logger = logging.getLogger(__name__)

T = TypeVar("T")


class Engine:
    """Serves requests with one model.

    Every method that uses the inbox raises `QueueFull`, `EngineFailed` and `Unavailable` as does
    `submit`; only `cancel` and `detach` never do.

    Args:
        loop: runs on the engine thread.
        inbox: commands from other threads.

    Attributes:
        limits: bounds of the requests that can be served.
        device: device of the model and of the feature rows.
        page_size: tokens in a page of the KV cache.
        decoder: the model; a draft in this process may borrow its tensors.
        cache: size of the KV cache on the device.
        num_kv_tokens: capacity of the KV cache in tokens, on all ranks.
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

    # Called from any thread: requests.

    def submit(self, request: GenerationRequest, sink: EventSink, key: int) -> None:
        """Queues a request; its events go to `sink` under `key`.

        Raises:
            InvalidArgument: the request can never be served.
            QueueFull: the inbox is full. A full admission queue arrives as a `Failed` event.
            EngineFailed: the engine thread died.
            Unavailable: the engine is stopping.
        """
        self.limits.check(request)
        self._inbox.post(lambda: self._loop.submit(request, sink, key))

    def cancel(self, sink: EventSink, key: int) -> None:
        """Ends a request, freeing its pages after the steps in flight. Unknown keys are ignored."""
        self._inbox.post_end(lambda: self._loop.cancel(sink, key))

    # Called from any thread: drafts.

    def feature_width(self, spec: FeatureSpec) -> int:
        """Returns the width of the feature rows that a spec asks for.

        Raises:
            FailedPrecondition: the target does not have these features.
        """
        config = self.decoder.config
        num_layers, hidden_size = config.num_layers, config.hidden_size
        spec.check(num_layers=num_layers, hidden_size=hidden_size)
        return spec.width(hidden_size)

    @property
    def largest_projection_bytes(self) -> int:
        """Bytes of the largest projection a draft can have, from the hidden states of `MAX_LAYERS`
        layers to one, at two bytes an element."""
        return 2 * MAX_LAYERS * self.decoder.config.hidden_size**2

    def attach(self, attachment: Attachment) -> None:
        """Adds a draft; running sequences without a draft are assigned to it."""
        self._inbox.post(lambda: self._loop.attach(attachment))

    def map_head(self, attachment_id: str, pages: Sequence[int]) -> None:
        """A draft's head is ready for rounds in mapped memory.

        Args:
            pages: pages of the draft's KV cache for the rounds alone; empty if that failed.
        """
        self._inbox.post(lambda: self._loop.drafts.map_head(attachment_id, pages))

    def detach(self, attachment_id: str) -> None:
        """Removes a draft; its sequences go on without it."""
        self._inbox.post_end(lambda: self._loop.drafts.detach(attachment_id))

    def offer(
        self,
        attachment_id: str,
        candidates: CandidateColumns,
        report: DraftReport = NO_REPORT,
    ) -> None:
        """Takes candidate trees and a report of a draft; a step in progress still sees them."""
        offer = Offer(attachment_id, candidates, report, self._loop.clock())
        self._loop.drafts.offers.append(offer)
        self._inbox.post(self._loop.drafts.take_offers)

    def release(self, attachment_id: str, sequence_ids: Sequence[int]) -> None:
        """A draft hands sequences back."""
        self._inbox.post(lambda: self._loop.drafts.release(attachment_id, sequence_ids))

    # Called from any thread: operators.

    @property
    def has_failed(self) -> bool:
        """Whether the engine thread died; no request will be served any more."""
        return self.death.done()

    @property
    def draft_algorithms(self) -> tuple[str, ...]:
        """Distinct algorithms of the drafts that are attached now, sorted."""
        return self._loop.attachments.drafts.algorithms

    @property
    def speculation_detail(self) -> str:
        """Why no trees are verified; empty while they are, or while the reason is unknown."""
        return self._loop.speculation.detail

    def attachments(self) -> Future[tuple[AttachmentStatus, ...]]:
        """Returns the attached drafts, oldest first, with their tree requests."""
        return self._inbox.call(self._loop.statuses)

    def gauges(self) -> Future[EngineGauges]:
        """Returns the live figures."""
        return self._inbox.call(self._loop.gauges)

    def flush_prefix_cache(self) -> Future[int]:
        """Frees every cached page that no sequence reads; returns their number."""
        return self._inbox.call(self._flush)

    def draft_updated(self) -> Future[None]:
        """A draft has new weights: what its model computed before is not used again."""
        return self._inbox.call(self._loop.draft_updated)

    def renew_policies(self) -> Future[None]:
        """Forgets how fast drafts have been, and how much of their trees was accepted."""
        return self._inbox.call(self._loop.renew_policies)

    def between_steps(self, function: Callable[[], None]) -> Future[None]:
        """Calls a function on the engine thread, between two launches of steps."""
        return self._inbox.call(function)

    def with_weights(self, function: Callable[[WeightControl], T]) -> Future[T]:
        """Calls a function with the weight control on the engine thread, between two launches of
        steps; returns the future of its result."""
        return self._inbox.call(lambda: function(self._loop.weights))

    def candidate_shapes(self, base: TreeShape) -> tuple[TreeShape, ...]:
        """Returns the tree shapes that may be requested of a draft, besides its own."""
        return self._loop.attachments.drafts.candidate_shapes(base)

    @property
    def weight_version(self) -> str:
        """The name of the current weights."""
        return self._loop.weights.version.name

    def read_table(self, table: Table, dtype: torch.dtype) -> Tensor:
        """Returns a table of the decoder; for the callbacks of `follow_weights`."""
        return self._loop.weights.table(table, dtype)

    def share_weights(self, ranks: RankStages) -> None:
        """Has the other ranks of the model take part in updates; call it before `start`."""
        self._loop.weights.share(ranks)

    def follow_weights(self, follow: Callable[[], None]) -> None:
        """Has `follow` called after each update of the weights; call it before `start`."""
        self._loop.weights.followers.append(follow)

    def start(self) -> None:
        """Starts the engine thread."""
        assert self._thread is None
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Ends the engine thread after its current step; requests still running fail."""
        self._inbox.close(Unavailable.draining)
        self._stop.set()
        if self._thread is not None:
            self._inbox.post_end(lambda: None)  # wakes the thread
            self._thread.join()

    # Called on the engine thread, or by the caller that has not started it.

    def step(self) -> bool:
        """Runs the queued commands and one step; returns whether the step did anything."""
        self._inbox.run_all()
        return self._loop.step()

    def gauges_now(self) -> EngineGauges:
        """Returns the live figures."""
        return self._loop.gauges()

    def statuses_now(self) -> tuple[AttachmentStatus, ...]:
        """Returns the attached drafts; see `attachments`."""
        return self._loop.statuses()

    def check_idle(self) -> None:
        """Asserts the invariants of all pages, while no sequence runs."""
        self._loop.check_idle(is_thorough=True)

    def _run(self) -> None:
        try:
            launch_on(self.device)
            while not self._stop.is_set():
                # `step` may have run the command by which `stop` wakes the thread.
                if not self.step() and not self._stop.is_set():
                    self._wait()
            self._inbox.run_all()
            self._loop.fail_all(Unavailable.draining())
        except Exception as error:  # whatever broke, every caller must be told
            if isinstance(error, RuntimeError) and is_shortage(error):
                advice = self.cache.advice(Shortage.of(error))
                logger.critical("no memory for a step: %s; or --chunked-prefill-size", advice)
            logger.exception("the engine failed")
            self.death.set_result(None)
            self._inbox.close(EngineFailed.of)
            while not self._drain_inbox():
                pass
            self._loop.fail_all(EngineFailed.of())

    def _drain_inbox(self) -> bool:
        """Runs the commands that were queued before the engine failed. Returns False if one of them
        failed, too; that command is gone, those behind it are still queued."""
        try:
            self._inbox.run_all()
        except Exception:
            logger.exception("a command failed after the engine had failed")
            return False
        return True

    def _wait(self) -> None:
        """Runs the next commands, or prepares for later steps while there are none."""
        timeout_s = self._loop.idle_timeout_s()
        if timeout_s is None and self._loop.runner.prepare_next():
            timeout_s = 0.0
        self._inbox.run_all(wait_s=timeout_s)
