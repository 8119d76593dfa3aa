"""The answers of Anthropic's interface: one message, whole or as its named events."""

from __future__ import annotations

from typing import Any

import orjson

from gateway.choice import Choice, Piece
from gateway.failures import Problem
from gateway.final_choice import check_field
from gateway.messages.blocks import BlockEvents, named_event, whole_blocks
from gateway.output.parts import Content
from gateway.plan import Plan
from gateway.usage import metrics, timings
from shared.errors import OutriderError
from shared.tokens import FinishReason

_DELTA = (
    b'event: content_block_delta\ndata: {"type":"content_block_delta","index":0,'
    b'"delta":{"type":"text_delta","text":'
)


def message(plan: Plan, choice: Choice, piece: Piece) -> dict[str, Any]:
    """Returns the whole message."""
    return {
        **_head(plan),
        "content": whole_blocks(piece.parts or (Content(piece.text),)),
        **_stop(choice),
        "usage": {**_input_usage(plan, choice), "output_tokens": choice.num_output_tokens},
        "metrics": metrics((choice,)),
        "timings": timings(plan, (choice,)),
        **check_field(choice),
    }


class MessageChunks:
    """Events of a message stream: start, block start, ping, deltas, block stop, delta, stop."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._blocks = BlockEvents()

    def opening(self, choice: Choice, usage_so_far: bytes) -> bytes:
        started = {
            **_head(self._plan),
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": {**_input_usage(self._plan, choice), "output_tokens": 0},
        }
        # Where thoughts or a call may come first, blocks open as they are known.
        opened = self._blocks.open_text() if self._plan.text.output is None else b""
        return named_event("message_start", message=started) + opened + named_event("ping")

    def news(self, choice: Choice, usage_so_far: bytes) -> bytes:
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
        usage = {**_input_usage(self._plan, choice), "output_tokens": choice.num_output_tokens}
        return (
            self._blocks.close()
            + named_event(
                "message_delta",
                delta=_stop(choice),
                usage=usage,
                metrics=metrics(choices),
                timings=timings(self._plan, choices),
                **check_field(choice),
            )
            + named_event("message_stop")
        )

    def failure(self, error: OutriderError) -> bytes:
        return b"event: error\ndata: " + orjson.dumps(Problem.of(error).anthropic_body()) + b"\n\n"


def _head(plan: Plan) -> dict[str, Any]:
    return {
        "id": plan.request_id,
        "type": "message",
        "role": "assistant",
        "model": plan.model,
        "system_fingerprint": plan.fingerprint,
    }


def _stop(choice: Choice) -> dict[str, Any]:
    if choice.finish_reason is FinishReason.LENGTH:
        return {"stop_reason": "max_tokens", "stop_sequence": None}
    if choice.has_calls:
        return {"stop_reason": "tool_use", "stop_sequence": None}
    matched = choice.matched_stop
    reason = "end_turn" if matched is None else "stop_sequence"
    return {"stop_reason": reason, "stop_sequence": matched}


def _input_usage(plan: Plan, choice: Choice) -> dict[str, int]:
    """Returns the prompt's part of `usage`; there, cached tokens are not among `input_tokens`."""
    return {
        "input_tokens": plan.num_prompt_tokens - choice.num_cached_tokens,
        "cache_read_input_tokens": choice.num_cached_tokens,
        "cache_creation_input_tokens": 0,
    }
