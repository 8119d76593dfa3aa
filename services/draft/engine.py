"""The draft engine: one thread that turns events of several targets into candidates.

`open_link` and `submit` never block and may be called from an event loop; outputs are handed to
the link's callback on the engine thread, which must not block either. Nothing here knows grpc, so
the target process can host the same engine over an in-process channel.
"""

from __future__ import annotations

import itertools
import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

from services.draft.drafters.drafter import Drafter
from services.draft.events import (
    CandidatesReady,
    Event,
    FeatureRows,
    LinkClosed,
    LinkOpened,
    LinkTerms,
    Opening,
    Output,
    ProbeDone,
    SequencesOpened,
)
from services.draft.fan_out import SYNCHRONOUS, FanOut
from services.draft.recorder import DraftRecorder
from services.draft.roster import Roster
from services.draft.rounds import Rounds
from services.draft.worker import MAX_TREE_NODES
from shared.errors import EngineFailed, QueueFull
from shared.tokens import SamplingParams, TreeShape

T = TypeVar("T")
Deliver = Callable[[Output], None]

MAX_WAITING_EVENTS = 4096

_UNLIMITED_VOCAB = 2**31

log = logging.getLogger(__name__)


class DraftEngine:
    """Owns the drafter, its thread, and the bounded queue into it."""

    def __init__(
        self,
        drafter: Drafter,
        shape: TreeShape,
        *,
        chunk_tokens: int,
        max_sequences: int,
        is_pinned: bool = False,
        fan_out: FanOut = SYNCHRONOUS,
        recorder: DraftRecorder | None = None,
        max_waiting_events: int = MAX_WAITING_EVENTS,
    ) -> None:
        self._drafter = drafter
        self.recorder = recorder or DraftRecorder()
        self._roster = Roster(
            drafter, max_sequences=max_sequences, deliver=self._deliver, recorder=self.recorder
        )
        self._rounds = Rounds(
            self._roster,
            drafter,
            shape,
            chunk_tokens=chunk_tokens,
            is_pinned=is_pinned,
            fan_out=fan_out,
            deliver=self._deliver,
        )
        if fan_out.budget and drafter.foresight is None:
            log.warning("this drafter cannot draft ahead: every tree follows its verdict")
        self._max_waiting_events = max_waiting_events
        self._wakeup = threading.Condition()
        self._events: deque[Event] = deque()
        self._calls: deque[Callable[[], None]] = deque()
        self._outlets: dict[int, Deliver] = {}
        self._futures: set[Future[Any]] = set()
        self._link_numbers = itertools.count(1)
        self._is_stopping = False
        self._has_failed = False
        self._thread = threading.Thread(target=self._run, name="draft-engine", daemon=True)

    @property
    def shape(self) -> TreeShape:
        return self._rounds.shape

    @property
    def is_pinned(self) -> bool:
        """Whether trees keep to `shape` whatever their targets wish."""
        return self._rounds.is_pinned

    @property
    def num_sequences(self) -> int:
        return len(self._roster)

    @property
    def has_failed(self) -> bool:
        return self._has_failed

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Ends the thread after the step in progress; waits for it."""
        with self._wakeup:
            self._is_stopping = True
            self._wakeup.notify()
        self._thread.join()

    def open_link(self, terms: LinkTerms, deliver: Deliver) -> int:
        """Opens a link and returns its number. `deliver` runs on the engine thread.

        Raises:
            QueueFull: see `submit`.
        """
        link = next(self._link_numbers)
        self._outlets[link] = deliver
        try:
            self.submit(LinkOpened(link, terms))
        except BaseException:
            del self._outlets[link]
            raise
        return link

    def close_link(self, link: int) -> None:
        """Ends a link with its sequences; nothing is delivered from then on. Never refused."""
        if self._outlets.pop(link, None) is not None:
            with self._wakeup:
                self._events.append(LinkClosed(link))
                self._wakeup.notify()

    def submit(self, event: Event) -> None:
        """Queues an event.

        Raises:
            QueueFull: the engine is too far behind; the link must be closed, because an event is
                lost.
            EngineFailed: the engine thread has died.
        """
        with self._wakeup:
            self._check_alive()
            if len(self._events) >= self._max_waiting_events:
                raise QueueFull.of(len(self._events), self._max_waiting_events)
            self._events.append(event)
            self._wakeup.notify()

    def propose_once(
        self,
        token_ids: Sequence[int],
        sampling: SamplingParams,
        shape: TreeShape | None,
        *,
        features: FeatureRows | None = None,
    ) -> Future[ProbeDone]:
        """Proposes one tree for a prompt, in a batch with whatever else is due. Cancelling the
        future gives the work up.

        Args:
            features: of every position but the last; without them a drafter that reads features
                proposes an empty tree.

        Raises:
            QueueFull, EngineFailed: see `submit`.
        """
        future: Future[ProbeDone] = self._track(Future())
        vocab_size = self._drafter.limits.vocab_size or _UNLIMITED_VOCAB
        terms = LinkTerms(vocab_size, MAX_TREE_NODES, max_sequences=1, mirrors_noise=True)
        link = self.open_link(terms, lambda output: _resolve_probe(future, output))
        future.add_done_callback(lambda _: self.close_link(link))
        opening = Opening(
            0, token_ids, len(token_ids), sampling, 0, shape, is_probe=True, features=features
        )
        try:
            self.submit(SequencesOpened(link, (opening,)))
        except QueueFull:
            self.close_link(link)
            raise
        return future

    def set_shape(self, shape: TreeShape, *, is_pinned: bool) -> Future[None]:
        """Replaces the shape of trees between two steps.

        Args:
            is_pinned: False lets targets wish for others.
        """

        def replace() -> None:
            self._rounds.shape, self._rounds.is_pinned = shape, is_pinned
            for link in self._roster.links:
                self._rounds.announce(link)

        return self._call(replace)

    @property
    def fan_out(self) -> FanOut:
        """Which verdicts are prepared for."""
        return self._rounds.fan_out

    def set_fan_out(self, fan_out: FanOut) -> Future[None]:
        """Replaces which verdicts are prepared for, between two forwards."""
        return self._call(lambda: setattr(self._rounds, "fan_out", fan_out))

    def flush_prefix_cache(self) -> Future[int]:
        """Drops unused cached state; resolves to the pages freed."""
        return self._call(self._drafter.flush_prefix_cache)

    def gauges(self) -> Future[dict[str, float]]:
        """Resolves to live figures for operators."""
        return self._call(
            lambda: {"sequence_count": float(len(self._roster)), **self._drafter.gauges()}
        )

    def check(self) -> Future[None]:
        """Asserts the drafter's invariants on the engine thread."""
        return self._call(self._drafter.check)

    def _call(self, function: Callable[[], T]) -> Future[T]:
        future: Future[T] = self._track(Future())
        with self._wakeup:
            self._check_alive()
            self._calls.append(lambda: _resolve(future, function))
            self._wakeup.notify()
        return future

    def _track(self, future: Future[T]) -> Future[T]:
        self._futures.add(future)
        future.add_done_callback(self._futures.discard)
        return future

    def _check_alive(self) -> None:
        if self._has_failed or self._is_stopping:
            raise EngineFailed.of()

    def _run(self) -> None:
        try:
            has_work = False
            while self._take_in(wait=not has_work):
                has_work = self._rounds.step()
        except BaseException:
            # Losing the draft costs its targets speed, never a token; going on with state of
            # unknown soundness could cost more.
            log.exception("the draft engine failed")
            with self._wakeup:
                self._has_failed = True
        finally:
            for future in list(self._futures):
                if future.set_running_or_notify_cancel():
                    future.set_exception(EngineFailed.of())

    def _take_in(self, *, wait: bool) -> bool:
        """Applies every queued event and call. False when the engine is to stop."""
        with self._wakeup:
            if wait:
                self._wakeup.wait_for(self._is_woken)
            events, self._events = self._events, deque()
            calls, self._calls = self._calls, deque()
        for event in events:
            self._roster.apply(event)
            if isinstance(event, LinkOpened) and self._rounds.is_pinned:
                self._rounds.announce(event.link)
        for call in calls:
            call()
        return not self._is_stopping

    def _is_woken(self) -> bool:
        return bool(self._events) or bool(self._calls) or self._is_stopping

    def _deliver(self, output: Output) -> None:
        deliver = self._outlets.get(output.link)
        if deliver is not None:
            deliver(output)


def _resolve(future: Future[T], function: Callable[[], T]) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        future.set_result(function())
    except Exception as error:
        future.set_exception(error)


def _resolve_probe(future: Future[ProbeDone], output: Output) -> None:
    """Candidates never come on a probe's link, announcements do; a refused probe comes back as
    released."""
    if isinstance(output, CandidatesReady):
        return
    if not future.set_running_or_notify_cancel():
        return
    if isinstance(output, ProbeDone):
        future.set_result(output)
    else:
        future.set_result(ProbeDone(output.link, None, 0.0))
