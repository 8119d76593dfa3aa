"""The content of a message: blocks of text, thinking and calls, whole or as events."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import orjson

from gateway.output.parts import CallArguments, CallBegun, Content, Part, Reasoning

_FIELDS = {"text": "text", "thinking": "thinking", "tool_use": "input"}
_DELTAS = {
    "text": ("text_delta", "text"),
    "thinking": ("thinking_delta", "thinking"),
    "tool_use": ("input_json_delta", "partial_json"),
}


def named_event(kind: str, **fields: Any) -> bytes:
    """Returns one event."""
    body = orjson.dumps({"type": kind, **fields})
    return b"event: " + kind.encode() + b"\ndata: " + body + b"\n\n"


def whole_blocks(parts: Sequence[Part]) -> list[dict[str, Any]]:
    """Returns the blocks of an output; one empty text when there is nothing."""
    blocks: list[dict[str, Any]] = []
    for part in parts:
        kind = _kind(part)
        if not blocks or isinstance(part, CallBegun) or blocks[-1]["type"] != kind:
            blocks.append(_opened(part))
        if not isinstance(part, CallBegun):
            blocks[-1][_FIELDS[kind]] += part.text
    for block in blocks:
        if block["type"] == "tool_use":
            block["input"] = _object(block["input"])
    return blocks or [{"type": "text", "text": ""}]


class BlockEvents:
    """Opens, fills and closes blocks as the parts of an output come."""

    def __init__(self) -> None:
        self._index = -1
        self._kind: str | None = None

    def open_text(self) -> bytes:
        """Opens a block of text before there is any."""
        return self._open(Content(""))

    def add(self, parts: Sequence[Part]) -> bytes:
        """Returns the events of more parts."""
        events: list[bytes] = []
        for part in parts:
            kind = _kind(part)
            if self._kind != kind or isinstance(part, CallBegun):
                events += [self._close(), self._open(part)]
            if not isinstance(part, CallBegun):
                delta, field = _DELTAS[kind]
                fields = {"type": delta, field: part.text}
                events.append(named_event("content_block_delta", index=self._index, delta=fields))
        return b"".join(events)

    def close(self) -> bytes:
        """Returns the last events; there is one block at least."""
        opened = self.open_text() if self._index < 0 else b""
        return opened + self._close()

    def _open(self, part: Part) -> bytes:
        self._index += 1
        self._kind = _kind(part)
        block = _opened(part)
        if self._kind == "tool_use":
            block["input"] = {}
        return named_event("content_block_start", index=self._index, content_block=block)

    def _close(self) -> bytes:
        if self._kind is None:
            return b""
        self._kind = None
        return named_event("content_block_stop", index=self._index)


def _kind(part: Part) -> str:
    if isinstance(part, Content):
        return "text"
    return "thinking" if isinstance(part, Reasoning) else "tool_use"


def _opened(part: Part) -> dict[str, Any]:
    if isinstance(part, CallBegun):
        return {"type": "tool_use", "id": part.call_id, "name": part.name, "input": ""}
    assert not isinstance(part, CallArguments), "a call begins before its arguments"
    if isinstance(part, Reasoning):
        # Nothing signs thoughts here; clients want the field.
        return {"type": "thinking", "thinking": "", "signature": ""}
    return {"type": "text", "text": ""}


def _object(arguments: str) -> Any:
    """Returns what the arguments say; those of a call that was cut off say nothing."""
    try:
        return json.loads(arguments)
    except ValueError:
        return {}
