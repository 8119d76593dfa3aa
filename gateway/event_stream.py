"""Answers over HTTP, as server-sent events or whole. Both end when the client goes away.

A chunk is built once per choice and engine step, so it must cost microseconds: what does not
change within a stream is encoded once, and only the text goes through the JSON encoder."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, Protocol

import orjson
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from gateway.answer import Answer
from gateway.bodies import delta_fields, metrics, timings, usage, usage_of_prompt
from gateway.choice import Choice, FinalChoice, Piece, stop_fields
from gateway.failures import ClientGone, error_body
from gateway.generation import round_fields
from gateway.http_server import BODY_WRITER, BodyWriter
from gateway.logprobs import chat_logprobs, completion_logprobs, echoed_logprobs
from gateway.planner import Plan
from shared.errors import OutriderError
from shared.text import Tokenizer

DONE = b"data: [DONE]\n\n"
OnEnd = Callable[[Sequence[Choice]], None]

_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # nginx would collect chunks otherwise
]
_BODY = "http.response.body"
_START = {"type": "http.response.start", "status": 200, "headers": _HEADERS}


class Chunks(Protocol):
    """The chunks of one stream, in the order their interface wants."""

    def opening(self, choice: Choice, usage_so_far: bytes) -> bytes:
        """Returns what comes before the first text of a choice; may be empty."""

    def news(self, choice: Choice, usage_so_far: bytes) -> bytes:
        """Returns what a choice has to say after a step; may be empty."""

    def closing(self, choices: tuple[Choice, ...]) -> bytes:
        """Returns the last events of a stream that ended well."""

    def failure(self, error: OutriderError) -> bytes:
        """Returns the last event of a stream that did not: nobody may take it for complete."""


def event(body: dict[str, Any]) -> bytes:
    """Returns one event."""
    return b"data: " + orjson.dumps(body) + b"\n\n"


class _OpenAiChunks:
    """What OpenAI's two streams share: the fields of a chunk around its choice, and their end."""

    def __init__(self, plan: Plan, tokenizer: Tokenizer, kind: str) -> None:
        self._plan = plan
        self._tokenizer = tokenizer
        self._head = {
            "id": plan.request_id,
            "object": kind,
            "created": plan.created,
            "model": plan.model,
            "system_fingerprint": plan.fingerprint,
            **({} if plan.service_tier is None else {"service_tier": plan.service_tier}),
        }
        self._before = b"data: " + orjson.dumps(self._head)[:-1] + b',"choices":[{"index":'

    def _after(self, usage_so_far: bytes) -> bytes:
        """Returns the end of a chunk. With usage asked for, chunks before the last carry null."""
        if usage_so_far:
            return b'}],"usage":' + usage_so_far + b"}\n\n"
        return b'}],"usage":null}\n\n' if self._plan.include_usage else b"}]}\n\n"

    def closing(self, choices: tuple[Choice, ...]) -> bytes:
        if not self._plan.include_usage:
            return DONE
        last = {
            **self._head,
            "choices": [],
            "usage": usage(self._plan, choices),
            "metrics": metrics(choices),
            "timings": timings(self._plan, choices),
        }
        return event(last) + DONE

    def failure(self, error: OutriderError) -> bytes:
        return event(error_body(error))  # without [DONE]


class ChatChunks(_OpenAiChunks):
    """`/v1/chat/completions`: role, deltas, one finish chunk for each choice, usage, `[DONE]`.

    Args:
        on_end: is given the choices when all have ended.
    """

    def __init__(self, plan: Plan, tokenizer: Tokenizer, on_end: OnEnd | None = None) -> None:
        super().__init__(plan, tokenizer, "chat.completion.chunk")
        self._on_end = on_end
        self._is_text_only = not (
            plan.text.with_logprobs
            or plan.text.with_rounds
            or plan.text.output is not None
            or plan.text.keeps_output
            or plan.return_token_ids
            or plan.continuous_usage
        )
        self._after_text = b'},"logprobs":null,"finish_reason":null' + self._after(b"")

    def opening(self, choice: Choice, usage_so_far: bytes) -> bytes:
        delta = b',"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null'
        after = self._after(usage_so_far)
        head = self._before + b"%d" % choice.index
        chunk = head + delta + after
        if self._plan.return_token_ids:
            prompt = self._plan.generations[choice.index].prompt_token_ids
            chunk = chunk[:-3] + b',"prompt_token_ids":' + orjson.dumps(prompt) + b"}\n\n"
        if self._plan.echoed_texts:
            echo = orjson.dumps({"content": self._plan.echoed_texts[0]})
            rest = b',"logprobs":null,"finish_reason":null' + after
            chunk += head + b',"delta":' + echo + rest
        return chunk

    def news(self, choice: Choice, usage_so_far: bytes) -> bytes:
        if not self._is_text_only or choice.finish_reason is not None:
            return self._full_news(choice, choice.take(), usage_so_far)
        text = choice.take_text()
        if not text:
            return b""
        # Nearly all streams consist of such chunks.
        before, after = self._before, self._after_text
        return b'%b%d,"delta":{"content":%b%b' % (before, choice.index, orjson.dumps(text), after)

    def _full_news(self, choice: Choice, piece: Piece | None, usage_so_far: bytes) -> bytes:
        before, after = self._before, self._after(usage_so_far)
        parts = []
        if piece is not None and self._is_worth_a_chunk(piece):
            parts += [before, b"%d" % choice.index, b',"delta":', _chat_delta(piece)]
            parts += [self._scores(piece)]
            parts += [b',"finish_reason":null', self._token_ids(piece)]
            parts += [rounds_field(piece, self._tokenizer), after]
        if choice.finish_name is not None:
            reason = choice.finish_name.encode()
            parts += [before, b"%d" % choice.index, b',"delta":{},"logprobs":null']
            parts += [b',"finish_reason":"', reason, b'"', stop_bytes(self._plan, choice), after]
        return b"".join(parts)

    def closing(self, choices: tuple[Choice, ...]) -> bytes:
        if self._on_end is not None:
            self._on_end(choices)
        return super().closing(choices)

    def _scores(self, piece: Piece) -> bytes:
        if not piece.scores:
            return b',"logprobs":null'
        return b',"logprobs":' + orjson.dumps(
            chat_logprobs(
                piece.scores,
                self._tokenizer,
                as_ids=self._plan.tokens_as_ids,
                with_drawn=self._plan.names_scored_tokens,
            )
        )

    def _is_worth_a_chunk(self, piece: Piece) -> bool:
        """An end token alone has no text; sent only to clients that asked for tokens or scores."""
        has_news = piece.text or piece.parts or piece.scores or piece.rounds
        return bool(has_news) or self._plan.return_token_ids

    def _token_ids(self, piece: Piece) -> bytes:
        return token_ids_field(piece) if self._plan.return_token_ids else b""


class CompletionChunks(_OpenAiChunks):
    """`/v1/completions`: text chunks, the last of each choice with its finish reason."""

    def __init__(self, plan: Plan, tokenizer: Tokenizer) -> None:
        super().__init__(plan, tokenizer, "text_completion")
        self._echoed: set[int] = set()

    def opening(self, choice: Choice, usage_so_far: bytes) -> bytes:
        """Echoes the prompt, and names its token ids, before any output."""
        if self._plan.echoes_scores:
            return b""  # they are not there yet
        return self._echo(choice, b',"logprobs":null', usage_so_far)

    def _echo(self, choice: Choice, scores: bytes, usage_so_far: bytes) -> bytes:
        prompt = choice.index // self._plan.num_choices
        echoed = self._plan.echoed_texts[prompt] if self._plan.echoed_texts else ""
        if not echoed and not self._plan.return_token_ids:
            return b""
        extra = b""
        if self._plan.return_token_ids:
            token_ids = self._plan.generations[choice.index].prompt_token_ids
            extra = b',"prompt_token_ids":' + orjson.dumps(token_ids) + b',"token_ids":[]'
        return self._chunk(choice, echoed, scores, b"null" + extra, usage_so_far)

    def news(self, choice: Choice, usage_so_far: bytes) -> bytes:
        piece = choice.take()
        if piece is None and choice.finish_reason is None:
            return b""
        echo = b""
        if self._plan.echoes_scores and choice.index not in self._echoed:
            self._echoed.add(choice.index)
            prompt = self._plan.generations[choice.index].prompt_token_ids
            as_ids = self._plan.tokens_as_ids
            echoed = self._plan.echoed_texts[choice.index // self._plan.num_choices]
            scores = echoed_logprobs(
                prompt, choice, (), self._tokenizer, echo_length=len(echoed), as_ids=as_ids
            )
            echo = self._echo(choice, b',"logprobs":' + orjson.dumps(scores), usage_so_far)
        return echo + self._news(choice, piece or Piece(""), usage_so_far)

    def _news(self, choice: Choice, piece: Piece, usage_so_far: bytes) -> bytes:
        reason = choice.finish_reason
        last = b"null"
        if reason is not None:
            last = b'"' + reason.value.encode() + b'"' + stop_bytes(self._plan, choice)
        if self._plan.return_token_ids:
            last += token_ids_field(piece)
        last += rounds_field(piece, self._tokenizer)
        return self._chunk(choice, piece.text, self._scores(choice, piece), last, usage_so_far)

    def _chunk(
        self, choice: Choice, text: str, scores: bytes, last: bytes, usage_so_far: bytes
    ) -> bytes:
        return b"".join(
            (
                self._before,
                b'%d,"text":' % choice.index,
                orjson.dumps(text),
                scores,
                b',"finish_reason":',
                last,
                self._after(usage_so_far),
            )
        )

    def _scores(self, choice: Choice, piece: Piece) -> bytes:
        if not piece.scores:
            return b',"logprobs":null'
        prompt = choice.index // self._plan.num_choices
        echoed = self._plan.echoed_texts[prompt] if self._plan.echoed_texts else ""
        scores = completion_logprobs(
            piece.scores,
            self._tokenizer,
            echo_length=len(echoed),
            as_ids=self._plan.tokens_as_ids,
        )
        return b',"logprobs":' + orjson.dumps(scores)


def rounds_field(piece: Piece, tokenizer: Tokenizer) -> bytes:
    """Returns the extra field of a choice whose request asked what its rounds did."""
    if not piece.rounds:
        return b""
    return b',"speculation":' + orjson.dumps({"rounds": round_fields(piece.rounds, tokenizer)})


def stop_bytes(plan: Plan, choice: Choice) -> bytes:
    """Returns the extra fields of a choice's last chunk: what ended it."""
    return b"," + orjson.dumps(stop_fields(plan, choice))[1:-1]


def _chat_delta(piece: Piece) -> bytes:
    if piece.parts:
        return orjson.dumps(delta_fields(piece))
    return b'{"content":' + orjson.dumps(piece.text) + b"}"


def token_ids_field(piece: Piece) -> bytes:
    """Returns the extra field of a choice that asked for its token ids."""
    return b',"token_ids":' + orjson.dumps(list(piece.token_ids))


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
        self._tells_usage = answer.plan.continuous_usage

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
        news = self._chunks.news(choice, self._usage_so_far())
        if news:
            writer.write(news)

    def _news(self, choices: Collection[Choice]) -> bytes:
        usage_so_far = self._usage_so_far()
        return b"".join([self._chunks.news(choice, usage_so_far) for choice in choices])

    def _usage_so_far(self) -> bytes:
        """Returns what chunks carry of it; nothing where nobody asks."""
        if not self._tells_usage:
            return b""
        return orjson.dumps(usage(self._answer.plan, self._answer.choices))


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
