"""Calls and reasoning in the shapes of OpenAI's chat interface."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gateway.choice import Piece
from gateway.output.parts import CallArguments, CallBegun, Part, Reasoning


def message_fields(piece: Piece) -> dict[str, Any]:
    """Returns what a whole message has of a piece."""
    calls = whole_calls(piece.parts)
    fields: dict[str, Any] = {"content": piece.text or None if calls else piece.text}
    if calls:
        fields["tool_calls"] = [
            {
                "id": call.call_id,
                "type": "function",
                "function": {"name": call.name, "arguments": arguments},
            }
            for call, arguments in calls
        ]
    return fields | _reasoning(piece)


def delta_fields(piece: Piece) -> dict[str, Any]:
    """Returns the delta of a stream that a piece is."""
    fields: dict[str, Any] = {"content": piece.text} if piece.text else {}
    calls = [
        _call_delta(part) for part in piece.parts if isinstance(part, CallBegun | CallArguments)
    ]
    if calls:
        fields["tool_calls"] = calls
    return fields | _reasoning(piece)


def reasoning_text(parts: Sequence[Part]) -> str:
    """Returns the reasoning of an output."""
    return "".join(part.text for part in parts if isinstance(part, Reasoning))


def whole_calls(parts: Sequence[Part]) -> list[tuple[CallBegun, str]]:
    """Returns the calls of an output, each with its arguments as written."""
    calls: dict[int, CallBegun] = {}
    arguments: dict[int, str] = {}
    for part in parts:
        if isinstance(part, CallBegun):
            calls[part.index], arguments[part.index] = part, ""
        elif isinstance(part, CallArguments):
            arguments[part.index] += part.text
    return [(call, arguments[index]) for index, call in calls.items()]


def _reasoning(piece: Piece) -> dict[str, Any]:
    """Both spellings are in use: vLLM's and DeepSeek's older one, and the one it has now."""
    text = reasoning_text(piece.parts)
    return {"reasoning_content": text, "reasoning": text} if text else {}


def _call_delta(part: CallBegun | CallArguments) -> dict[str, Any]:
    if isinstance(part, CallArguments):
        return {"index": part.index, "function": {"arguments": part.text}}
    return {
        "index": part.index,
        "id": part.call_id,
        "type": "function",
        "function": {"name": part.name, "arguments": ""},
    }
