"""Server-sent events of OpenAI's two streaming interfaces, put together from bytes.

A chunk is built once per choice and engine step, so it must cost microseconds: what does not
change within a stream is encoded once, and only the text goes through the JSON encoder.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import orjson

from gateway.chat_parts import delta_fields
from gateway.choice import Choice, Piece
from gateway.failures import error_body
from gateway.final_choice import stop_fields
from gateway.logprobs import chat_logprobs, completion_logprobs
from gateway.plan import Plan
from gateway.prompt_logprobs import echoed_logprobs
from gateway.rounds import round_fields
from gateway.usage import metrics, timings, usage
from shared.errors import OutriderError
from shared.text.tokenizer import Tokenizer

DONE = b"data: [DONE]\n\n"
OnEnd = Callable[[Sequence[Choice]], None]


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


class _Envelope:
    """The fields of a stream's chunk around its choice."""

    def __init__(self, plan: Plan, kind: str) -> None:
        self.plan = plan
        self.head = {
            "id": plan.request_id,
            "object": kind,
            "created": plan.created,
            "model": plan.model,
            "system_fingerprint": plan.fingerprint,
            **({} if plan.service_tier is None else {"service_tier": plan.service_tier}),
        }
        self.before = b"data: " + orjson.dumps(self.head)[:-1] + b',"choices":[{"index":'

    def after(self, usage_so_far: bytes) -> bytes:
        """Returns the end of a chunk. With usage asked for, chunks before the last carry null."""
        if usage_so_far:
            return b'}],"usage":' + usage_so_far + b"}\n\n"
        return b'}],"usage":null}\n\n' if self.plan.include_usage else b"}]}\n\n"

    def closing(self, choices: tuple[Choice, ...]) -> bytes:
        if not self.plan.include_usage:
            return DONE
        last = {
            **self.head,
            "choices": [],
            "usage": usage(self.plan, choices),
            "metrics": metrics(choices),
            "timings": timings(self.plan, choices),
        }
        return event(last) + DONE

    def failure(self, error: OutriderError) -> bytes:
        return event(error_body(error))  # without [DONE]


class ChatChunks:
    """`/v1/chat/completions`: role, deltas, one finish chunk for each choice, usage, `[DONE]`.

    Args:
        on_end: is given the choices when all have ended.
    """

    def __init__(self, plan: Plan, tokenizer: Tokenizer, on_end: OnEnd | None = None) -> None:
        self._plan = plan
        self._tokenizer = tokenizer
        self._on_end = on_end
        self._envelope = _Envelope(plan, "chat.completion.chunk")
        self._is_text_only = not (
            plan.text.with_logprobs
            or plan.text.with_rounds
            or plan.text.output is not None
            or plan.return_token_ids
            or plan.continuous_usage
        )
        self._after_text = b'},"logprobs":null,"finish_reason":null' + self._envelope.after(b"")

    def opening(self, choice: Choice, usage_so_far: bytes) -> bytes:
        delta = b',"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null'
        after = self._envelope.after(usage_so_far)
        head = self._envelope.before + b"%d" % choice.index
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
        piece = choice.take()
        if self._is_text_only and choice.finish_reason is None:
            return b"" if piece is None else self._text_chunk(choice.index, piece.text)
        return self._full_news(choice, piece, usage_so_far)

    def _text_chunk(self, index: int, text: str) -> bytes:
        """Returns the chunk that nearly all streams consist of: nothing but text."""
        before, after = self._envelope.before, self._after_text
        return b'%b%d,"delta":{"content":%b%b' % (before, index, orjson.dumps(text), after)

    def _full_news(self, choice: Choice, piece: Piece | None, usage_so_far: bytes) -> bytes:
        before, after = self._envelope.before, self._envelope.after(usage_so_far)
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
        return self._envelope.closing(choices)

    def failure(self, error: OutriderError) -> bytes:
        return self._envelope.failure(error)

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


class CompletionChunks:
    """`/v1/completions`: text chunks, the last of each choice with its finish reason."""

    def __init__(self, plan: Plan, tokenizer: Tokenizer) -> None:
        self._plan = plan
        self._tokenizer = tokenizer
        self._envelope = _Envelope(plan, "text_completion")
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

    def closing(self, choices: tuple[Choice, ...]) -> bytes:
        return self._envelope.closing(choices)

    def failure(self, error: OutriderError) -> bytes:
        return self._envelope.failure(error)

    def _chunk(
        self, choice: Choice, text: str, scores: bytes, last: bytes, usage_so_far: bytes
    ) -> bytes:
        return b"".join(
            (
                self._envelope.before,
                b'%d,"text":' % choice.index,
                orjson.dumps(text),
                scores,
                b',"finish_reason":',
                last,
                self._envelope.after(usage_so_far),
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
