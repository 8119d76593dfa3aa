"""The answer to one HTTP request: its choices, generated side by side; and the check of an
output against a schema that a grammar enforces only in part."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import orjson
from starlette.types import Receive

from gateway.api_keys import current_quota
from gateway.bodies import whole_calls
from gateway.choice import Choice
from gateway.constraints import AnswerSchemas
from gateway.failures import Aborted, ClientGone, ClientTooSlow, client_names
from gateway.generation import Event, Finished, NodeBudget
from gateway.http_server import BodyWriter
from gateway.metrics import RequestRecord
from gateway.planner import Plan
from gateway.pool import RoutedGeneration
from gateway.schema_trial import Verdict, unknown
from shared.errors import OutriderError
from shared.generation import Delta, PromptScored, Started
from shared.grammar import JsonSchema
from shared.tokens import FinishReason

if TYPE_CHECKING:
    from gateway.serving import Gateway

IndexedEvent = tuple[int, Event]
TakeNow = Callable[[int, Delta], bool]
_MAX_PROCESSES = 2


class AnswerQueue:
    """Unread events of one answer, each with its choice index, in order of arrival.

    `put` never waits: it is called by the reader of the session, which a slow client shares with
    others. The number of unread tokens is bounded; at the bound the backlog is dropped and
    `on_overflow` called once. Unread rounds lose their trees above `MAX_UNSENT_NODES`.

    Attributes:
        take_now: takes a delta at once while the task waits in `take`, which saves waking the
            task; returns False to leave the delta to the task.
    """

    def __init__(self, max_unread_tokens: int, on_overflow: Callable[[], None]) -> None:
        self._max_unread_tokens = max_unread_tokens
        self._on_overflow = on_overflow
        self.take_now: TakeNow | None = None
        self._events: list[IndexedEvent] = []
        self._num_unread_tokens = 0
        self._nodes = NodeBudget()
        self._closed: Exception | None = None
        self._waiter: asyncio.Future[None] | None = None

    def put(self, index: int, event: Event) -> None:
        """Adds an event; ignored after `close` and `end`."""
        if self._closed is not None:
            return
        if isinstance(event, Delta):
            is_awaited = self._waiter is not None and not self._events
            if is_awaited and self.take_now is not None and self.take_now(index, event):
                return
            self._num_unread_tokens += len(event.token_ids)
            if event.trace is not None:
                event.trace = self._nodes.admit(event.trace)
            if self._num_unread_tokens > self._max_unread_tokens:
                message = f"the client left more than {self._max_unread_tokens:,} tokens unread"
                self.close(ClientTooSlow(message, reason="CLIENT_TOO_SLOW"))
                self._on_overflow()
                return
        self._events.append((index, event))
        self.wake()

    def close(self, reason: Exception) -> None:
        """Drops the unread events and makes `take` raise `reason`."""
        if self._closed is None:
            self._closed = reason
            self._events.clear()
            self.wake()

    def end(self, reason: Exception) -> None:
        """Makes `take` raise `reason` after the unread events are taken."""
        if self._closed is None:
            self._closed = reason
            self.wake()

    async def take(self) -> list[IndexedEvent]:
        """Waits for events and returns all unread ones; none only after `wake`.

        Raises:
            ClientGone, ClientTooSlow, Aborted: the reason given to `close` or `end`.
        """
        if not self._events and self._closed is None:
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        if not self._events and self._closed is not None:
            raise self._closed
        events, self._events = self._events, []
        self._num_unread_tokens = 0
        self._nodes.num_nodes = 0
        return events

    def wake(self) -> None:
        """Makes a waiting `take` return."""
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class Answer:
    """Submits the generations of a plan and follows their events.

    Attributes:
        num_open: choices that have not ended.
        owner: name of the client's key.
    """

    def __init__(self, plan: Plan, gateway: Gateway, endpoint: str) -> None:
        """Raises:
        Unavailable: the gateway is stopping.
        """
        gateway.lifecycle.check_open()
        self.plan = plan
        self._texts = plan.texts or (plan.text,) * len(plan.generations)
        self.choices = tuple(
            Choice(index, gateway.text.tokenizer, text) for index, text in enumerate(self._texts)
        )
        self.num_open = len(self.choices)
        self._gateway = gateway
        self._endpoint = endpoint
        self._record: RequestRecord
        self._queue = AnswerQueue(gateway.settings.max_unread_tokens, self.cancel)
        self._routed: list[RoutedGeneration] = []
        self._has_schemas = any(text.schemas is not None for text in self._texts)
        self._quota = current_quota.get()
        self.owner = "" if self._quota is None else self._quota.name

    @asynccontextmanager
    async def running(self, receive: Receive | None = None) -> AsyncIterator[None]:
        """Submits every generation and enters the block at the first event. Nothing has been sent
        to the client until then. Leaving the block cancels the generations that still run, after an
        error, a client that went away, or choices that a stop string ended.

        Args:
            receive: tells when the client goes away; None where no client waits.

        Raises:
            OutriderError: no target took the request.
        """
        gateway, error = self._gateway, None
        record = RequestRecord(self._endpoint, self.plan, gateway.metrics, gateway.tracer)
        self._record = record
        watch = None if receive is None else asyncio.create_task(self._watch(receive))
        gateway.open_answers.add(self)
        gateway.lifecycle.count(1)
        try:
            name = self.plan.model.name
            for index, generation in enumerate(self.plan.generations):
                generation = replace(
                    generation,
                    traceparent=record.traceparent,
                    timeout_s=gateway.settings.request_timeout_s,
                    never_learnt=self._quota is not None and self._quota.never_learnt,
                )
                deliver = partial(self._queue.put, index)
                self._routed.append(gateway.pool.submit(generation, name, deliver))
            await self.step()
            yield
        except BaseException as raised:
            error = raised
            raise
        finally:
            if watch is not None:
                watch.cancel()
            self.cancel()
            num_output = record.end(self.choices, error)
            # A request that failed without output is free.
            if self._quota is not None and (num_output or error is None):
                self._quota.charge(self.plan.num_prompt_tokens + num_output)
            gateway.open_answers.discard(self)
            gateway.lifecycle.count(-1)

    async def _watch(self, receive: Receive) -> None:
        """Cancels every generation and makes `step` raise `ClientGone` once the client is away."""
        while (await receive())["type"] != "http.disconnect":
            pass
        self.cancel()
        self._queue.close(ClientGone())

    async def step(self) -> Collection[Choice]:
        """Waits for events and applies them; returns the changed choices, each once.

        Raises:
            OutriderError: a generation failed; the others are of no use without it.
            ClientGone, ClientTooSlow: nobody reads.
            Aborted: the request was aborted by its id.
            Unavailable: the gateway stops.
        """
        changed: dict[int, Choice] = {}
        for index, event in await self._queue.take():
            choice = self.choices[index]
            if choice.finish_reason is not None:  # a stop string ended it during a step
                continue
            changed[index] = choice
            if isinstance(event, Delta):
                self._push(choice, event)
            elif isinstance(event, Started):
                choice.num_cached_tokens = event.num_cached_tokens
                choice.started_s = self._record.started(choice)
            elif isinstance(event, PromptScored):
                choice.prompt_scores.extend(event.logprobs)
            elif isinstance(event, Finished):
                choice.finish(event)
                self.num_open -= 1
            else:
                with client_names({"grammar": self.plan.grammar_field}):
                    raise event.error
        if self._has_schemas:
            for choice in changed.values():
                schemas = self._texts[choice.index].schemas
                if schemas is not None and choice.finish_reason is not None:
                    choice.schema_check = await self._gateway.schema_checks.run(schemas, choice)
        return changed.values()

    def send_at_once(self, writer: BodyWriter, news: Callable[[Choice], bytes]) -> None:
        """Makes tokens go out as they arrive, while `step` waits and the client reads: waking the
        task of a stream costs more than all its other work in a step.

        Args:
            news: returns the events for a choice's new output.
        """
        if self._has_schemas:  # `step` waits for the schema check before the last chunk
            return
        choices = self.choices

        def take_now(index: int, delta: Delta) -> bool:
            if not writer.is_ready():
                return False
            choice = choices[index]
            if choice.finish_reason is not None:
                return True
            try:
                self._push(choice, delta)
                if chunk := news(choice):
                    writer.write(chunk)
            except Exception as error:  # `step` raises it
                self._queue.close(error)
            if choice.finish_reason is not None:
                self._queue.wake()
            return True

        self._queue.take_now = take_now

    def abort(self, error: OutriderError | None = None) -> None:
        """Cancels every generation and makes `step` raise an error after the events that have
        arrived.

        Args:
            error: None is `Aborted`, with which the client gets the output so far.
        """
        self.cancel()
        message = f"request {self.plan.request_id} was aborted"
        self._queue.end(error or Aborted(message, reason="REQUEST_ABORTED"))

    def cancel(self) -> None:
        """Cancels every generation that still runs."""
        for routed in self._routed:
            routed.cancel()

    def _push(self, choice: Choice, delta: Delta) -> None:
        self._record.tokens(choice, delta)
        choice.push(delta)
        if choice.finish_reason is not None:  # a stop string, which the target does not know
            self._routed[choice.index].cancel()
            self.num_open -= 1


class SchemaChecks:
    """Checks each answer in a separate process, two at a time."""

    def __init__(self, timeout_s: float = 5.0) -> None:
        self._timeout_s = timeout_s
        self._slots = asyncio.Semaphore(_MAX_PROCESSES)

    async def run(self, schemas: AnswerSchemas, choice: Choice) -> Verdict | None:
        """Returns the verdict on an ended choice; None where there is nothing to check, or the
        output was cut off."""
        if choice.finish_reason is not FinishReason.STOP:
            return None
        pairs = _pairs(schemas, choice)
        if not pairs:
            return None
        try:
            async with asyncio.timeout(self._timeout_s), self._slots:
                return await _run_trial(orjson.dumps(pairs))
        except TimeoutError:
            return unknown(f"the check took more than {self._timeout_s:g} s")


def _pairs(schemas: AnswerSchemas, choice: Choice) -> list[tuple[JsonSchema, str]]:
    """Returns the schemas to check, each with the JSON text that must match it."""
    output = choice.whole_output()
    calls = whole_calls(output.parts)
    if calls:
        return [(schemas.calls[c.name], text) for c, text in calls if c.name in schemas.calls]
    return [] if schemas.text is None else [(schemas.text, output.text)]


async def _run_trial(pairs: bytes) -> Verdict:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "gateway.schema_trial"),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
        cwd=Path(__file__).parents[1],
    )
    try:
        content, _ = await process.communicate(pairs)
    finally:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()
    if not content:
        return unknown("the check failed")
    verdict: Verdict = orjson.loads(content)
    return verdict
