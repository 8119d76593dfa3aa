"""Background responses: generated without an open connection and fetched by the client later."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import nullcontext
from typing import Any

from gateway.answer import Answer
from gateway.api_keys import current_quota
from gateway.failures import Aborted, Problem
from gateway.responses.answer import ResponseChunks
from gateway.responses.chat import ResponsePlan, store_ended
from gateway.responses.store import ResponseStore, StoredResponse, log_failure
from shared.errors import OutriderError, QueueFull
from shared.text import Tokenizer

_MAX_RUNNING = 256


class BackgroundResponse:
    """One background response and the events of its stream.

    Attributes:
        body: the body of the response in its present state.
        events: events of the stream so far; element n has sequence number n.
        is_wanted: False once the client has deleted the response.
    """

    def __init__(self, plan: ResponsePlan, answer: Answer, tokenizer: Tokenizer) -> None:
        self.plan = plan
        self.answer = answer
        self.chunks = ResponseChunks(plan, tokenizer, self._set_body)
        self.body: dict[str, Any] = self.chunks.response() | {"status": "queued"}
        self.events: list[bytes] = []
        self.is_wanted = True
        self._is_over = False
        self._news = asyncio.Event()

    @property
    def stored(self) -> StoredResponse:
        is_stream = self.plan.chat.is_stream
        events = self.events if is_stream else None
        return StoredResponse(self.body, self.plan.history.new_items, events)

    def add(self, chunk: bytes) -> int:
        """Adds the events of a chunk; returns how many of its bytes are kept."""
        if not self.plan.chat.is_stream:
            return 0
        self.events += [event + b"\n\n" for event in chunk.split(b"\n\n")[:-1]]
        self._wake()
        return len(chunk)

    def end(self) -> None:
        self._is_over = True
        self._wake()

    async def follow(self, after: int = -1) -> AsyncIterator[bytes]:
        """Yields the events that follow sequence number `after`, until the response ends."""
        position = after + 1
        while True:
            news = self._news
            if position < len(self.events):
                chunk, position = b"".join(self.events[position:]), len(self.events)
                yield chunk
            elif self._is_over:
                return
            else:
                await news.wait()

    def _wake(self) -> None:
        self._news.set()
        self._news = asyncio.Event()

    def _set_body(self, body: dict[str, Any]) -> None:
        self.body = body


class BackgroundResponses:
    """Runs background responses and holds the ones that have not ended."""

    def __init__(self, store: ResponseStore, tokenizer: Tokenizer) -> None:
        self._store = store
        self._tokenizer = tokenizer
        self._running: dict[tuple[str, str], BackgroundResponse] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._num_bytes = 0

    async def start(self, owner: str, plan: ResponsePlan, answer: Answer) -> BackgroundResponse:
        """Raises:
        QueueFull: `_MAX_RUNNING` background responses run already.
        """
        if len(self._running) >= _MAX_RUNNING:
            raise QueueFull.of(len(self._running), _MAX_RUNNING)
        response = BackgroundResponse(plan, answer, self._tokenizer)
        self._running[owner, plan.chat.request_id] = response
        log_failure(self._store.put(owner, response.stored))
        task = asyncio.create_task(self._run(owner, response))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return response

    def find(self, owner: str, response_id: str) -> BackgroundResponse | None:
        return self._running.get((owner, response_id))

    def forget(self, owner: str, response_id: str) -> None:
        """Aborts a response, if it runs, and does not store it."""
        response = self.find(owner, response_id)
        if response is not None:
            response.is_wanted = False
            response.answer.abort()

    async def cancel(self, owner: str, response_id: str) -> None:
        """Aborts a response, if it runs, and waits until it has ended and is being stored."""
        response = self.find(owner, response_id)
        if response is not None:
            response.answer.abort()
            async for _ in response.follow(len(response.events)):
                pass

    async def _run(self, owner: str, response: BackgroundResponse) -> None:
        quota = current_quota.get()
        num_bytes = 0
        try:
            with nullcontext() if quota is None else quota.place():
                async for chunk in self._chunks(owner, response):
                    added = response.add(chunk)
                    num_bytes += added
                    self._num_bytes += added
                    self._check_room()
        except Aborted:
            self._fail(response, "cancelled", None)
        except OutriderError as error:
            problem = Problem.of(error)
            fields = {"code": "server_error", "message": problem.message}
            self._fail(response, "failed", fields)
        finally:
            self._num_bytes -= num_bytes
            del self._running[owner, response.plan.chat.request_id]
            if response.is_wanted:
                store_ended(self._store, owner, response.plan, response.stored)
            response.end()

    async def _chunks(self, owner: str, response: BackgroundResponse) -> AsyncIterator[bytes]:
        chunks, answer = response.chunks, response.answer
        async with answer.running():
            response.body = chunks.response()
            if response.is_wanted:
                log_failure(self._store.put(owner, response.stored))
            (choice,) = answer.choices
            yield chunks.opening(choice, b"")
            yield chunks.news(choice, b"")
            while answer.num_open:
                await answer.step()
                yield chunks.news(choice, b"")
            yield chunks.closing(answer.choices)

    def _fail(
        self, response: BackgroundResponse, status: str, error: dict[str, Any] | None
    ) -> None:
        response.body = response.chunks.response() | {"status": status, "error": error}
        response.add(response.chunks.ended(response.body))

    def _check_room(self) -> None:
        """Raises:
        QueueFull: the events of all running responses take more bytes than the store may hold.

        """
        limit = self._store.max_bytes
        if self._num_bytes > limit:
            message = f"events of background responses take {self._num_bytes:,} bytes of {limit:,}"
            raise QueueFull(message, reason="BACKGROUND_FULL")
