"""Requests become sequences: queued or refused, announced when their turn comes. No torch."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

from services.target.drafts.draft_registry import DraftRegistry
from services.target.requests.event_stream import Subscriptions
from services.target.requests.request import EventSink, GenerationRequest, ModelLimits, Started
from services.target.scheduler import Scheduler
from services.target.sequence import Sequence
from shared.errors import InvalidArgument, QueueFull


class NewSequences:
    """The way of requests into the queue and out of it. Owned by the engine thread."""

    def __init__(
        self,
        limits: ModelLimits,
        scheduler: Scheduler,
        subscriptions: Subscriptions,
        drafts: DraftRegistry,
    ) -> None:
        self._limits = limits
        self._scheduler = scheduler
        self._subscriptions = subscriptions
        self._drafts = drafts
        self._ids = itertools.count(1)

    def queue(self, request: GenerationRequest, sink: EventSink, key: int) -> None:
        """Queues a request, or fails it: the queue is full, or it names an unknown algorithm."""
        sequence = Sequence.of(next(self._ids), request, self._limits)
        try:
            self._drafts.check_algorithm(request.draft_algorithm)
            self._scheduler.submit(sequence)
        except (InvalidArgument, QueueFull) as error:
            self._subscriptions.refuse(sink, key, error)
            return
        self._subscriptions.add(sequence, sink, key)

    def start(self, admitted: Iterable[Sequence], now_s: float) -> list[Sequence]:
        """Announces the sequences that leave the queue for the first time, and returns them; the
        others were preempted and return."""
        started = [sequence for sequence in admitted if not sequence.started]
        for sequence in started:
            sequence.started = True
            sequence.decided_s = now_s
            sequence.num_cached_tokens = sequence.num_computed
            queue_s = now_s - sequence.request.arrival_s
            self._subscriptions.emit(sequence, Started(sequence.num_cached_tokens, queue_s))
        return started
