"""Answers over HTTP: as server-sent events, or whole. Both end when the client goes away."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager
from functools import partial

import orjson
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from gateway.answer import Answer
from gateway.choice import Choice, Piece
from gateway.chunks import Chunks
from gateway.final_choice import FinalChoice
from gateway.http_protocol import BODY_WRITER, BodyWriter
from gateway.inbox import ClientGone
from gateway.usage import usage, usage_of_prompt
from shared.errors import OutriderError

_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # nginx would collect chunks otherwise
]
_BODY = "http.response.body"
_START = {"type": "http.response.start", "status": 200, "headers": _HEADERS}


class _Reported(Exception):
    """The failure of an answer, already told to the client."""


class EventStream(Response):
    """Sends chunks as the target's steps arrive.

    A raw ASGI response: Starlette's own costs half as much again per chunk. Headers go out when
    the target starts on the request, so that a refusal can still be a status. `send` waits while
    the client does not read; what arrives meanwhile is merged into one chunk per choice. While it
    reads, and the server has a `BodyWriter`, chunks are written as tokens arrive.
    """

    def __init__(self, answer: Answer, chunks: Chunks) -> None:
        super().__init__()
        self._answer = answer
        self._chunks = chunks

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            with self._answer as answer:
                async with _abandon_on_disconnect(answer, receive):
                    await answer.begin()
                    await send(_START)
                    # A task of its own, with a short stack: waking this one walks through the
                    # frame of every middleware, and a stream is woken once a step.
                    writer = scope.get("extensions", {}).get(BODY_WRITER)
                    await asyncio.create_task(self._send_choices(answer, send, writer))
        except (ClientGone, _Reported):
            return

    async def _send_choices(self, answer: Answer, send: Send, writer: BodyWriter | None) -> None:
        chunks = self._chunks
        try:
            plan = answer.plan
            at_first = usage_of_prompt(plan, answer.choices) if plan.continuous_usage else None
            told = b"" if at_first is None else orjson.dumps(at_first)
            body = b"".join([chunks.opening(each, told) for each in answer.choices])
            body += self._news(answer.choices)
            if writer is not None and len(answer.choices) == 1:  # several share a write
                answer.send_at_once(writer.is_ready, partial(self._write_news, writer))
            while not answer.is_complete:
                if body:
                    await send({"type": _BODY, "body": body, "more_body": True})
                body = self._news(await answer.step())
            body += chunks.closing(answer.choices)
            await send({"type": _BODY, "body": body, "more_body": False})
        except OutriderError as error:
            await send({"type": _BODY, "body": chunks.failure(error), "more_body": False})
            raise _Reported from error

    def _write_news(self, writer: BodyWriter, choice: Choice) -> None:
        usage_so_far = self._usage_so_far() if self._answer.plan.continuous_usage else b""
        news = self._chunks.news(choice, usage_so_far)
        if news:
            writer.write(news)

    def _news(self, choices: Collection[Choice]) -> bytes:
        usage_so_far = self._usage_so_far()
        return b"".join([self._chunks.news(choice, usage_so_far) for choice in choices])

    def _usage_so_far(self) -> bytes:
        """Returns what chunks carry of it; nothing where nobody asks."""
        plan, choices = self._answer.plan, self._answer.choices
        return orjson.dumps(usage(plan, choices)) if plan.continuous_usage else b""


async def whole_answer(answer: Answer, receive: Receive) -> list[FinalChoice]:
    """Waits for the end and returns every choice with all of its output.

    Raises:
        OutriderError: a generation failed.
        ClientGone: nobody is left to answer.
    """
    with answer:
        async with _abandon_on_disconnect(answer, receive):
            await answer.begin()
            while not answer.is_complete:
                await answer.step()
    return [
        FinalChoice(choice, choice.take() or Piece(""), choice.index) for choice in answer.choices
    ]


@asynccontextmanager
async def _abandon_on_disconnect(answer: Answer, receive: Receive) -> AsyncIterator[None]:
    watch = asyncio.create_task(_watch_disconnect(answer, receive))
    try:
        yield
    finally:
        watch.cancel()


async def _watch_disconnect(answer: Answer, receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    answer.abandon()
