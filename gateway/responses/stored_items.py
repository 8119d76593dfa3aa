"""Input items as they are kept and listed: with an id and in the long form."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from typing import Any

from gateway.responses.schema import InputItem
from gateway.responses.store import Item

_PREFIXES = {
    "message": "msg",
    "function_call": "fc",
    "function_call_output": "fco",
    "reasoning": "rs",
    "compaction": "cmp",
}


def stored_items(given: str | Sequence[InputItem] | None) -> list[Item]:
    """Returns what a client gave as items of their own."""
    if given is None:
        return []
    if isinstance(given, str):
        given = [InputItem(type="message", role="user", content=given)]
    return [_stored(item) for item in given]


def _stored(item: InputItem) -> Item:
    stored: dict[str, Any] = {"type": item.type, **item.model_dump(exclude_none=True)}
    stored.setdefault("id", f"{_PREFIXES.get(item.type, 'item')}_{uuid.uuid4().hex}")
    if item.type in ("message", "function_call", "function_call_output", "reasoning"):
        stored.setdefault("status", "completed")
    if item.type == "message":
        stored["content"] = _parts(item)
    if item.type == "reasoning":
        stored.setdefault("summary", [])
    return stored


def _parts(item: InputItem) -> list[dict[str, Any]]:
    is_output = item.role == "assistant"
    kind = "output_text" if is_output else "input_text"
    if isinstance(item.content, list):
        given = [part.model_dump(exclude_none=True) for part in item.content]
    else:
        given = [{"type": kind, "text": item.content or ""}]
    if not is_output:
        return given
    return [{"annotations": [], "logprobs": [], **part} for part in given]
