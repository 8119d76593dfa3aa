"""`/v1/messages` and `/v1/messages/count_tokens`, Anthropic's interface."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import orjson
from fastapi import FastAPI, Request
from starlette.responses import Response

from gateway.answer import Answer
from gateway.bodies import metrics, timings
from gateway.choice import Choice, FinalChoice, check_field
from gateway.event_stream import named_event, respond
from gateway.failures import Problem
from gateway.generation import fingerprint
from gateway.messages.schema import (
    MessageAnswer,
    MessagesRequest,
    Prompt,
    messages_plan,
    prompt_chat,
)
from gateway.output.argument_formats import refuse_constant
from gateway.output.parser import CallArguments, CallBegun, Content, Part, Reasoning
from gateway.planner import Plan
from gateway.serving import Gateway
from shared.errors import OutriderError
from shared.tokens import FinishReason

_FIELDS = {"text": "text", "thinking": "thinking", "tool_use": "input"}
_DELTAS = {
    "text": ("text_delta", "text"),
    "thinking": ("thinking_delta", "thinking"),
    "tool_use": ("input_json_delta", "partial_json"),
}

_DELTA = (
    b'event: content_block_delta\ndata: {"type":"content_block_delta","index":0,'
    b'"delta":{"type":"text_delta","text":'
)


class Blocks:
    """Opens, fills and closes content blocks as the parts of an output arrive."""

    def __init__(self) -> None:
        self._blocks: list[dict[str, Any]] = []
        self._texts: list[list[str]] = []  # the pieces of each block's text
        self._is_open = False

    def open_text(self) -> bytes:
        """Opens a block that has no text yet."""
        return self._open(Content(""))

    def add(self, parts: Sequence[Part]) -> bytes:
        """Adds parts of the output and returns their events."""
        events: list[bytes] = []
        for part in parts:
            kind = _kind(part)
            is_new = isinstance(part, CallBegun) or not self._is_open
            if is_new or self._blocks[-1]["type"] != kind:
                events += [self._close(), self._open(part)]
            if not isinstance(part, CallBegun):
                self._texts[-1].append(part.text)
                delta, field = _DELTAS[kind]
                fields = {"type": delta, field: part.text}
                events.append(named_event("content_block_delta", index=self._index, delta=fields))
        return b"".join(events)

    def close(self) -> bytes:
        """Returns the last events. An empty output gets one empty text block."""
        opened = b"" if self._blocks else self.open_text()
        return opened + self._close()

    def whole(self) -> list[dict[str, Any]]:
        """Returns all blocks with their content."""
        blocks = []
        for block, pieces in zip(self._blocks, self._texts, strict=True):
            kind, text = block["type"], "".join(pieces)
            value = _object(text) if kind == "tool_use" else text
            blocks.append({**block, _FIELDS[kind]: value})
        return blocks

    @property
    def _index(self) -> int:
        return len(self._blocks) - 1

    def _open(self, part: Part) -> bytes:
        block = _empty_block(part)
        self._blocks.append(block)
        self._texts.append([])
        self._is_open = True
        return named_event("content_block_start", index=self._index, content_block=block)

    def _close(self) -> bytes:
        if not self._is_open:
            return b""
        self._is_open = False
        return named_event("content_block_stop", index=self._index)


def _kind(part: Part) -> str:
    if isinstance(part, Content):
        return "text"
    return "thinking" if isinstance(part, Reasoning) else "tool_use"


def _empty_block(part: Part) -> dict[str, Any]:
    if isinstance(part, CallBegun):
        return {"type": "tool_use", "id": part.call_id, "name": part.name, "input": {}}
    assert not isinstance(part, CallArguments), "a call begins before its arguments"
    if isinstance(part, Reasoning):
        # Reasoning is not signed here, but clients expect the field.
        return {"type": "thinking", "thinking": "", "signature": ""}
    return {"type": "text", "text": ""}


def _object(arguments: str) -> Any:
    """Returns the arguments of a call as the model wrote them, for `orjson`; empty if they are no
    object, because the call was cut off."""
    try:
        is_object = isinstance(json.loads(arguments, parse_constant=refuse_constant), dict)
    except (ValueError, RecursionError):
        is_object = False
    return orjson.Fragment(arguments) if is_object else {}


class MessageEncoder:
    """`/v1/messages`: start, block start, ping, deltas, block stop, delta, stop."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._blocks = Blocks()

    def opening(self, choice: Choice) -> bytes:
        started = {
            **_head(self._plan),
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": {**_input_usage(self._plan, choice), "output_tokens": 0},
        }
        # If reasoning or a call may come first, the first block opens with the first part.
        opened = self._blocks.open_text() if self._plan.text.output is None else b""
        return named_event("message_start", message=started) + opened + named_event("ping")

    def news(self, choice: Choice) -> bytes:
        piece = choice.take()
        if piece is None:
            return b""
        if piece.parts:
            return self._blocks.add(piece.parts)
        if not piece.text:
            return b""
        return _DELTA + orjson.dumps(piece.text) + b"}}\n\n"

    def closing(self, choices: tuple[Choice, ...]) -> bytes:
        (choice,) = choices
        delta = named_event(
            "message_delta", delta=_stop(choice), **_final_fields(self._plan, choice)
        )
        return self._blocks.close() + delta + named_event("message_stop")

    def failure(self, error: OutriderError) -> bytes:
        body = Problem.of(error).anthropic_body()
        return named_event(body.pop("type"), **body)

    def whole(self, choices: Sequence[FinalChoice]) -> dict[str, Any]:
        (final,) = choices
        self._blocks.add(final.piece.parts or (Content(final.piece.text),))
        return {
            **_head(self._plan),
            "content": self._blocks.whole(),
            **_stop(final.choice),
            **_final_fields(self._plan, final.choice),
        }


def _head(plan: Plan) -> dict[str, Any]:
    return {
        "id": plan.request_id,
        "type": "message",
        "role": "assistant",
        "model": plan.model.name,
        "system_fingerprint": fingerprint(plan.model),
    }


def _stop(choice: Choice) -> dict[str, Any]:
    if choice.finish_reason is FinishReason.LENGTH:
        return {"stop_reason": "max_tokens", "stop_sequence": None}
    if choice.finish_name == "tool_calls":
        return {"stop_reason": "tool_use", "stop_sequence": None}
    matched = choice.matched_stop
    reason = "end_turn" if matched is None else "stop_sequence"
    return {"stop_reason": reason, "stop_sequence": matched}


def _final_fields(plan: Plan, choice: Choice) -> dict[str, Any]:
    """Returns the fields that are known only at the end of a message."""
    return {
        "usage": {**_input_usage(plan, choice), "output_tokens": choice.num_output_tokens},
        "metrics": metrics((choice,)),
        "timings": timings(plan, (choice,)),
        **check_field(choice),
    }


def _input_usage(plan: Plan, choice: Choice) -> dict[str, int]:
    """Returns the prompt's part of `usage`. Anthropic's `input_tokens` leaves out cached tokens."""
    return {
        "input_tokens": plan.num_prompt_tokens - choice.num_cached_tokens,
        "cache_read_input_tokens": choice.num_cached_tokens,
        "cache_creation_input_tokens": 0,
    }


def add_message_routes(app: FastAPI, gateway: Gateway) -> None:
    """Adds the routes."""

    @app.post("/v1/messages", tags=["anthropic"], responses={200: {"model": MessageAnswer}})
    async def messages(body: MessagesRequest, request: Request) -> Response:
        plan = await messages_plan(body, gateway.planner, gateway.pool.model(body.model))
        answer = Answer(plan, gateway, "messages")
        return await respond(answer, MessageEncoder(plan), request.receive)

    @app.post("/v1/messages/count_tokens", tags=["anthropic"])
    async def count_tokens(body: Prompt) -> dict[str, int]:
        gateway.pool.model(body.model)
        planner = gateway.planner
        chat = prompt_chat(body, planner.text.style)
        return {"input_tokens": len(await planner.chat_prompt(chat))}
