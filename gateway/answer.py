"""The answer to one HTTP request: its choices, generated side by side."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from functools import partial
from types import TracebackType
from typing import Self

from gateway.choice import Choice
from gateway.field_names import client_names
from gateway.generation import Delta, Event, Failed, Finished, PromptScored, Started
from gateway.inbox import Aborted, ClientGone, Inbox
from gateway.limits import RequestLimits
from gateway.open_answers import OpenAnswers
from gateway.plan import Plan
from gateway.pool import TargetPool
from gateway.quota import current_quota, owner_of_request
from gateway.request_record import RequestRecord
from gateway.routed_generation import RoutedGeneration
from gateway.schema_check import SchemaChecks
from shared.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class AnswerContext:
    """Fields that every answer to a request shares."""

    pool: TargetPool
    tokenizer: Tokenizer
    limits: RequestLimits
    open_answers: OpenAnswers
    schema_checks: SchemaChecks


class Answer:
    """Submits the generations of a plan and follows their events.

    Leaving the context cancels what still runs, whatever the reason: an error, a client that
    went away, or choices that a stop string ended.
    """

    def __init__(self, plan: Plan, context: AnswerContext, record: RequestRecord) -> None:
        self.plan = plan
        self.choices = tuple(
            Choice(index, context.tokenizer, plan.text_of(index))
            for index in range(len(plan.generations))
        )
        self._context = context
        self._record = record
        self._inbox = Inbox(context.limits.max_unread_tokens, self.cancel)
        self._routed: list[RoutedGeneration] = []
        self._num_open = len(self.choices)
        texts = plan.texts or (plan.text,)
        self._is_checked = any(text.schemas is not None for text in texts)
        self.owner = owner_of_request()

    def __enter__(self) -> Self:
        self._context.open_answers.open(self)
        self._record.begin()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.cancel()
        self._context.open_answers.close(self)
        self._record.end(self.choices, error)
        num_output = sum(choice.num_output_tokens for choice in self.choices)
        quota = current_quota.get()
        if quota is not None and num_output:  # what no target took costs nothing
            quota.charge(self.plan.num_prompt_tokens + num_output)

    @property
    def request_id(self) -> str:
        return self.plan.request_id

    @property
    def trace_id(self) -> str:
        return self.plan.generations[0].trace_id

    @property
    def is_complete(self) -> bool:
        return self._num_open == 0

    async def begin(self) -> None:
        """Submits everything and waits until the target starts on the first choice.

        Raises:
            OutriderError: no target took the request. Nothing has been sent to the client yet.
        """
        quota = current_quota.get()
        for index, generation in enumerate(self.plan.generations):
            deliver = partial(self._inbox.put, index)
            generation = replace(
                generation,
                traceparent=self._record.traceparent,
                timeout_s=self._context.limits.request_timeout_s,
                never_learnt=quota is not None and quota.never_learnt,
            )
            self._routed.append(self._context.pool.submit(generation, self.plan.model, deliver))
        await self.step()

    async def step(self) -> Collection[Choice]:
        """Waits for news and applies it; returns the choices it is about, each once.

        Raises:
            OutriderError: a generation failed; the others are of no use without it.
            ClientGone, ClientTooSlow: nobody reads.
            Aborted: somebody asked for that.
        """
        touched: dict[int, Choice] = {}
        for index, event in await self._inbox.take():
            choice = self.choices[index]
            if (
                choice.finish_reason is not None
            ):  # a step that was under way when a stop string ended it
                continue
            self._apply(choice, event)
            touched[index] = choice
        if self._is_checked:
            for choice in touched.values():
                await self._check(choice)
        return touched.values()

    def send_at_once(self, can_send: Callable[[], bool], send: Callable[[Choice], None]) -> None:
        """Sends tokens while they arrive, where `step` waits and the client reads: waking the task
        of a stream costs more than all else that a step does for it."""

        def take_now(index: int, delta: Delta) -> bool:
            if not can_send() or self._is_checked:
                return False
            choice = self.choices[index]
            if choice.finish_reason is not None:
                return True
            try:
                self._push(choice, delta)
                send(choice)
            except Exception as error:  # for `step` to raise
                self._inbox.close(error)
            if choice.finish_reason is not None:
                self._inbox.wake()
            return True

        self._inbox.take_now = take_now

    def abandon(self) -> None:
        """The client went away: cancels everything and makes `step` raise `ClientGone`."""
        self.cancel()
        self._inbox.close(ClientGone())

    def abort(self) -> None:
        """Cancels everything and makes `step` raise `Aborted` once all that had arrived is read:
        the client gets an answer."""
        self.cancel()
        self._inbox.end(Aborted.of(self.request_id))

    def cancel(self) -> None:
        """Cancels every generation that still runs, each once."""
        for routed in self._routed:
            routed.cancel()

    async def _check(self, choice: Choice) -> None:
        schemas = self.plan.text_of(choice.index).schemas
        if schemas is not None and choice.is_finished:
            choice.schema_check = await self._context.schema_checks.run(schemas, choice)

    def _apply(self, choice: Choice, event: Event) -> None:
        if isinstance(event, Delta):
            self._push(choice, event)
        elif isinstance(event, Started):
            choice.start(event)
            self._record.started(choice)
        elif isinstance(event, PromptScored):
            choice.prompt_scores.extend(event.logprobs)
        elif isinstance(event, Finished):
            choice.finish(event)
            self._num_open -= 1
        elif isinstance(event, Failed):
            with client_names({"grammar": self.plan.grammar_field}):
                raise event.error

    def _push(self, choice: Choice, delta: Delta) -> None:
        self._record.tokens(choice, delta)
        choice.push(delta)
        if choice.finish_reason is not None:  # a stop string, of which the target knows nothing
            self._routed[choice.index].cancel()
            self._num_open -= 1
