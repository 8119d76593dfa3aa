"""HTTP answers, streamed as server-sent events or whole. Both end when the client goes away.

A chunk is built for every choice and engine step, so it must cost microseconds: the constant part
of a stream's chunks is encoded once, and only the text goes through the JSON encoder."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import orjson
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from gateway.answer import Answer
from gateway.bodies import (
    chat_completion,
    chat_logprobs,
    completion,
    completion_logprobs,
    delta_fields,
    echoed_logprobs,
    ending,
    head,
    rounds_field,
    usage,
    usage_of_prompt,
)
from gateway.choice import Choice, FinalChoice, Piece, stop_fields
from gateway.failures import ClientGone, Problem, json_response
from gateway.http_server import BODY_WRITER, BodyWriter
from gateway.schema import StreamOptions
from shared.errors import OutriderError
from shared.text import Tokenizer

DONE = b"data: [DONE]\n\n"
OnEnd = Callable[[Sequence[Choice]], None]

_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # else nginx buffers the chunks
]
_BODY = "http.response.body"
_UNFINISHED = {"logprobs": None, "finish_reason": None}
_START = {"type": "http.response.start", "status": 200, "headers": _HEADERS}


class Encoder(Protocol):
    """Writes one answer in the format of its interface: as events in order, or whole."""

    def opening(self, choice: Choice) -> bytes:
        """Returns the events before the first text of a choice; may be empty."""

    def news(self, choice: Choice) -> bytes:
        """Returns the events for a choice's new output after a step; may be empty."""

    def closing(self, choices: tuple[Choice, ...]) -> bytes:
        """Returns the last events of a stream that ended well."""

    def failure(self, error: OutriderError) -> bytes:
        """Returns the last event of a failed stream, which clients must not take for complete."""

    def whole(self, choices: Sequence[FinalChoice]) -> Any:
        """Returns the JSON of an answer that is not streamed."""


def event(body: dict[str, Any]) -> bytes:
    """Returns one server-sent event."""
    return b"data: " + orjson.dumps(body) + b"\n\n"


def named_event(kind: str, **fields: Any) -> bytes:
    """Returns one server-sent event that is named by its type."""
    return b"event: " + kind.encode() + b"\n" + event({"type": kind, **fields})


class _OpenAiEncoder:
    """The shared part of OpenAI's two streams: the fields around a choice, and the last events.

    Args:
        on_end: called with the choices when all have ended.
    """

    def __init__(
        self, answer: Answer, tokenizer: Tokenizer, kind: str, on_end: OnEnd | None = None
    ) -> None:
        self._choices = answer.choices
        self._plan = answer.plan
        self._body = answer.plan.body
        self._on_end = on_end
        self._tokenizer = tokenizer
        options = self._body.stream_options or StreamOptions()
        self._has_usage, self._is_continuous = options.include_usage, options.is_continuous
        self._head = head(self._plan, kind)
        self._before = b"data: " + orjson.dumps(self._head)[:-1] + b',"choices":[{"index":'
        # With `include_usage`, chunks before the last have a null usage.
        self._after = b'}],"usage":null}\n\n' if self._has_usage else b"}]}\n\n"

    def _chunk(self, choice: Choice, fields: dict[str, Any], *, is_opening: bool = False) -> bytes:
        """Returns a chunk with the given fields of a choice."""
        after = self._after
        if self._is_continuous:
            count = usage_of_prompt if is_opening else usage
            after = b'}],"usage":%b}\n\n' % orjson.dumps(count(self._plan, self._choices))
        return b"%b%d,%b%b" % (self._before, choice.index, orjson.dumps(fields)[1:-1], after)

    def _extras(self, piece: Piece) -> dict[str, Any]:
        """Returns the fields of a choice that only some requests ask for."""
        ids = {"token_ids": list(piece.token_ids)} if self._body.return_token_ids else {}
        return ids | rounds_field(piece)

    def closing(self, choices: tuple[Choice, ...]) -> bytes:
        if self._on_end is not None:
            self._on_end(choices)
        if not self._has_usage:
            return DONE
        return event({**self._head, "choices": [], **ending(self._plan, choices)}) + DONE

    def failure(self, error: OutriderError) -> bytes:
        return event(Problem.of(error).openai_body())  # without [DONE]


class ChatEncoder(_OpenAiEncoder):
    """`/v1/chat/completions`: role, deltas, one finish chunk for each choice, usage, `[DONE]`."""

    def __init__(self, answer: Answer, tokenizer: Tokenizer, on_end: OnEnd | None = None) -> None:
        super().__init__(answer, tokenizer, "chat.completion.chunk", on_end)
        text = answer.plan.text
        self._is_text_only = not (
            text.with_logprobs
            or text.with_rounds
            or text.output is not None
            or text.keeps_output
            or self._body.return_token_ids
            or self._is_continuous
        )
        self._after_text = b'},"logprobs":null,"finish_reason":null' + self._after

    def opening(self, choice: Choice) -> bytes:
        begun = {"delta": {"role": "assistant", "content": ""}, **_UNFINISHED}
        chunk = self._chunk(choice, begun, is_opening=True)
        if self._body.return_token_ids:
            prompt = self._plan.generations[choice.index].prompt_token_ids
            chunk = chunk[:-3] + b',"prompt_token_ids":' + orjson.dumps(prompt) + b"}\n\n"
        if self._plan.echoed_texts:
            echoed = {"delta": {"content": self._plan.echoed_texts[0]}, **_UNFINISHED}
            chunk += self._chunk(choice, echoed, is_opening=True)
        return chunk

    def news(self, choice: Choice) -> bytes:
        if self._is_text_only and choice.finish_reason is None:
            text = choice.take_text()
            if not text:
                return b""
            # Nearly all chunks of nearly all streams take this path.
            before, content, after = self._before, orjson.dumps(text), self._after_text
            return b'%b%d,"delta":{"content":%b%b' % (before, choice.index, content, after)
        piece, chunks = choice.take(), b""
        # An end token alone has no text; only clients that want tokens or scores get its chunk.
        wants_ids = self._body.return_token_ids
        if piece and (piece.text or piece.parts or piece.scores or piece.rounds or wants_ids):
            delta = delta_fields(piece) if piece.parts else {"content": piece.text}
            scores = chat_logprobs(self._plan, piece.scores, self._tokenizer)
            fields = {"delta": delta, **_UNFINISHED, "logprobs": scores, **self._extras(piece)}
            chunks += self._chunk(choice, fields)
        finish_name = choice.finish_name
        if finish_name is not None:
            reason = {"finish_reason": finish_name, **stop_fields(self._plan, choice)}
            chunks += self._chunk(choice, {"delta": {}, **_UNFINISHED, **reason})
        return chunks

    def whole(self, choices: Sequence[FinalChoice]) -> dict[str, Any]:
        if self._on_end is not None:
            self._on_end(self._choices)
        return chat_completion(self._plan, choices, self._tokenizer)


class CompletionEncoder(_OpenAiEncoder):
    """`/v1/completions`: text chunks, the last of each choice with its finish reason."""

    def __init__(self, answer: Answer, tokenizer: Tokenizer) -> None:
        super().__init__(answer, tokenizer, "text_completion")
        self._echoed: set[int] = set()

    def opening(self, choice: Choice) -> bytes:
        """Echoes the prompt, and lists its token ids, before any output."""
        # With scores the echo waits: the prompt's scores have not arrived yet.
        return b"" if self._plan.echoes_scores else self._echo(choice, is_opening=True)

    def _echo(self, choice: Choice, *, is_opening: bool) -> bytes:
        plan = self._plan
        echoed = plan.echoed_text_of(choice.index)
        if not echoed and not self._body.return_token_ids:
            return b""
        scores = echoed_logprobs(plan, choice, (), self._tokenizer) if plan.echoes_scores else None
        fields: dict[str, Any] = {"text": echoed, "logprobs": scores, "finish_reason": None}
        if self._body.return_token_ids:
            prompt = plan.generations[choice.index].prompt_token_ids
            fields |= {"prompt_token_ids": prompt, "token_ids": []}
        return self._chunk(choice, fields, is_opening=is_opening)

    def news(self, choice: Choice) -> bytes:
        piece, reason = choice.take(), choice.finish_reason
        if piece is None and reason is None:
            return b""
        piece, echo = piece or Piece(""), b""
        if self._plan.echoes_scores and choice.index not in self._echoed:
            self._echoed.add(choice.index)
            echo = self._echo(choice, is_opening=False)
        fields = {
            "text": piece.text,
            "logprobs": completion_logprobs(self._plan, choice, piece.scores, self._tokenizer),
            "finish_reason": None if reason is None else reason.value,
            **({} if reason is None else stop_fields(self._plan, choice)),
            **self._extras(piece),
        }
        return echo + self._chunk(choice, fields)

    def whole(self, choices: Sequence[FinalChoice]) -> dict[str, Any]:
        return completion(self._plan, choices, self._tokenizer)


class _Reported(Exception):
    """The answer failed, and the client has already been sent the error."""


class EventStream(Response):
    """Sends chunks as the target's steps arrive.

    A raw ASGI response: Starlette's own costs half as much again per chunk. Headers are sent when
    the target starts the request, so that a refusal can still have its HTTP status. `send` waits
    while the client does not read; tokens of that time are merged into one chunk for each choice.
    While the client reads, and the server has a `BodyWriter`, chunks are written as tokens arrive.
    """

    def __init__(self, answer: Answer, encoder: Encoder) -> None:
        super().__init__()
        self._answer = answer
        self._encoder = encoder

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async with self._answer.running(receive):
                await send(_START)
                # A task with a short stack: waking the request's task walks through the frames of
                # all middleware, and a stream is woken once a step.
                writer = scope.get("extensions", {}).get(BODY_WRITER)
                await asyncio.create_task(self._send_choices(send, writer))
        except (ClientGone, _Reported):
            return

    async def _send_choices(self, send: Send, writer: BodyWriter | None) -> None:
        answer, encoder = self._answer, self._encoder
        try:
            body = b"".join([encoder.opening(choice) for choice in answer.choices])
            body += b"".join([encoder.news(choice) for choice in answer.choices])
            if writer is not None and len(answer.choices) == 1:  # several choices share a write
                answer.send_at_once(writer, encoder.news)
            while answer.num_open:
                if body:
                    await send({"type": _BODY, "body": body, "more_body": True})
                body = b"".join([encoder.news(choice) for choice in await answer.step()])
            body += encoder.closing(answer.choices)
            await send({"type": _BODY, "body": body, "more_body": False})
        except OutriderError as error:
            await send({"type": _BODY, "body": encoder.failure(error), "more_body": False})
            raise _Reported from error


async def respond(answer: Answer, encoder: Encoder, receive: Receive) -> Response:
    """Returns an answer's response: a stream, or one JSON object at the end.

    Raises:
        OutriderError: a generation of an answer that is not streamed failed.
        ClientGone: the client of such an answer closed the connection.
    """
    if answer.plan.body.stream:
        return EventStream(answer, encoder)
    return json_response(encoder.whole(await whole_answer(answer, receive)))


async def whole_answer(answer: Answer, receive: Receive) -> list[FinalChoice]:
    """Waits for the end and returns every choice with its whole output.

    Raises:
        OutriderError: a generation failed.
        ClientGone: the client closed the connection.
    """
    async with answer.running(receive):
        while answer.num_open:
            await answer.step()
    return [
        FinalChoice(choice, choice.take() or Piece(""), choice.index) for choice in answer.choices
    ]
