"""The `n` outputs of one request, from their submission to the last of their ends."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace

from services.target.engine import Engine
from services.target.requests.event_stream import EventStream
from services.target.requests.request import (
    Delta,
    Event,
    Failed,
    Finished,
    GenerationRequest,
    SpeculationStats,
)
from services.target.requests.request_record import RequestRecord, RequestRecorder
from services.target.vllm.choice_output import ChoiceOutput
from services.target.vllm.text_stop import TextStop
from shared.errors import OutriderError
from shared.tokens import FinishReason

_ABORTED = Finished(FinishReason.CANCELLED, 0, 0, 0, None, SpeculationStats())


class OpenChoices:
    """Runs outputs side by side, keyed by their index. On the event loop.

    Attributes:
        choices: none before `submit`.
    """

    def __init__(self, engine: Engine, recorder: RequestRecorder) -> None:
        self.choices: tuple[ChoiceOutput, ...] = ()
        self._engine = engine
        self._recorder = recorder
        self._records: list[RequestRecord] = []
        self._stream = EventStream(asyncio.get_running_loop())
        self._is_aborted = False

    def record(self, request_id: str, num_prompt: int, parent: str | None) -> RequestRecord:
        """Begins the record of the next output; what fails from here on is counted."""
        record = self._recorder.begin(request_id, num_prompt, parent)
        self._records.append(record)
        return record

    def submit(
        self, requests: Sequence[GenerationRequest], stops: Sequence[TextStop | None]
    ) -> None:
        """Starts the outputs, each with its record.

        Raises:
            OutriderError: the engine refuses them.
        """
        self.choices = tuple(
            ChoiceOutput(index, request, stop)
            for index, (request, stop) in enumerate(zip(requests, stops, strict=True))
        )
        if self._is_aborted:
            self.abort()
            return
        for choice, record in zip(self.choices, self._records, strict=True):
            request = replace(choice.request, traceparent=record.traceparent)
            self._engine.submit(request, self._stream, choice.index)

    async def outputs(self) -> AsyncIterator[tuple[ChoiceOutput, Delta | None]]:
        """Yields each output that changed, with the tokens that were added, until all have ended.

        Raises:
            OutriderError: one of them failed.
        """
        num_left = len(self.choices)
        while num_left:
            for key, event in await self._stream.next_batch():
                choice = self.choices[key]
                if choice.finished is not None:
                    continue
                taken = self._take(choice, event)
                num_left -= choice.finished is not None
                yield choice, taken if isinstance(taken, Delta) else None

    def abort(self) -> None:
        """Ends all outputs that still run; their output is kept."""
        self._is_aborted = True
        for choice in self._running:
            self._engine.cancel(self._stream, choice.index)
            self._stream.put(choice.index, _ABORTED)

    def fail(self, error: OutriderError) -> None:
        """Notes why the request ends."""
        for record in self._records:
            record.fail(Failed(error))

    def close(self) -> None:
        """Frees what still runs; nobody waits for it."""
        for choice in self._running:
            self._engine.cancel(self._stream, choice.index)
        for record in self._records:
            record.end()

    @property
    def _running(self) -> list[ChoiceOutput]:
        return [choice for choice in self.choices if choice.finished is None]

    def _take(self, choice: ChoiceOutput, event: Event) -> Event:
        if isinstance(event, Failed):
            raise event.error
        if event is _ABORTED:
            choice.end(FinishReason.CANCELLED)
            return event
        record = self._records[choice.index]
        taken = choice.push(event)
        record.observe(taken)
        if isinstance(taken, Delta) and choice.finished is not None:  # by a stop string
            record.observe(choice.finished)
            self._engine.cancel(self._stream, choice.index)
        return taken
