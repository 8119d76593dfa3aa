"""The output of a response as items: reasoning, messages and calls, whole or as events."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from gateway.output.parts import CallBegun, Content, Part, Reasoning

Event = tuple[str, dict[str, Any]]
Logprobs = list[dict[str, Any]]

_NAMES = {"message": "output_text", "reasoning": "reasoning_text"}
_PREFIXES = {"message": "msg", "reasoning": "rs", "function_call": "fc"}


@dataclass(slots=True)
class Item:
    """One item so far.

    Attributes:
        call: of a call, its id and name.
        logprobs: of a message's text.
        namespace: of a call, the namespace of its tool and the tool's name there, if it has one.
    """

    kind: str
    item_id: str
    index: int
    call: CallBegun | None = None
    text: str = ""
    logprobs: Logprobs = field(default_factory=list)
    namespace: tuple[str, str] | None = None

    def shown(self, status: str) -> dict[str, Any]:
        """Returns the item; its content once it is no longer in progress."""
        is_over = status != "in_progress"
        if self.call is not None:
            shown = {
                "id": self.item_id,
                "type": "function_call",
                "call_id": self.call.call_id,
                "name": self.call.name,
                "arguments": self.text if is_over else "",
                "status": status,
            }
            if self.namespace is None:
                return shown
            namespace, name = self.namespace
            return {**shown, "namespace": namespace, "name": name}
        shown = {"id": self.item_id, "type": self.kind, "status": status}
        content = [self.part()] if is_over else []
        if self.kind == "reasoning":
            return {**shown, "summary": [], "content": content}
        return {**shown, "role": "assistant", "content": content}

    def part(self) -> dict[str, Any]:
        """Returns the one part of its content."""
        if self.kind == "reasoning":
            return {"type": "reasoning_text", "text": self.text}
        return {
            "type": "output_text",
            "text": self.text,
            "annotations": [],
            "logprobs": self.logprobs,
        }


class Items:
    """Opens, fills and closes items as the parts of an output come.

    Args:
        message_id: of the first message.
        namespaces: by the names of tools as the model knows them.
    """

    def __init__(self, message_id: str, namespaces: Mapping[str, tuple[str, str]]) -> None:
        self._namespaces = namespaces
        self._message_ids = [message_id]
        self.items: list[Item] = []
        self._is_open = False

    def open_message(self) -> list[Event]:
        """Opens a message before there is any text."""
        return self._open(Content(""))

    def add(self, parts: Sequence[Part], logprobs: Logprobs) -> list[Event]:
        """Returns the events of more parts.

        Args:
            logprobs: of the text among them.
        """
        events: list[Event] = []
        for part in parts:
            is_new = isinstance(part, CallBegun) or not self._is_open
            if is_new or self.items[-1].kind != _kind(part):
                events += self.close("completed")
                events += self._open(part)
            if not isinstance(part, CallBegun):
                events += self._fill(self.items[-1], part.text, logprobs)
                logprobs = logprobs if self.items[-1].kind != "message" else []
        return events

    def note(self, logprobs: Logprobs) -> None:
        """Adds log probabilities of tokens without text."""
        if self._is_open and self.items[-1].kind == "message":
            self.items[-1].logprobs += logprobs

    def close(self, status: str) -> list[Event]:
        """Returns the last events of the item that is open, if one is."""
        if not self._is_open:
            return []
        self._is_open = False
        item = self.items[-1]
        place = _place(item)
        done: list[Event] = [
            ("response.output_item.done", {"output_index": item.index, "item": item.shown(status)})
        ]
        if item.call is not None:
            whole = {**place, "name": item.shown(status)["name"], "arguments": item.text}
            return [("response.function_call_arguments.done", whole), *done]
        inner = {**place, "content_index": 0}
        text: dict[str, Any] = {**inner, "text": item.text}
        if item.kind == "message":
            text["logprobs"] = item.logprobs
        return [
            (f"response.{_NAMES[item.kind]}.done", text),
            ("response.content_part.done", {**inner, "part": item.part()}),
            *done,
        ]

    def _fill(self, item: Item, text: str, logprobs: Logprobs) -> list[Event]:
        item.text += text
        place = _place(item)
        if item.call is not None:
            return [("response.function_call_arguments.delta", {**place, "delta": text})]
        delta: dict[str, Any] = {**place, "content_index": 0, "delta": text}
        if item.kind == "message":
            item.logprobs += logprobs
            delta["logprobs"] = logprobs
        return [(f"response.{_NAMES[item.kind]}.delta", delta)]

    def _open(self, part: Part) -> list[Event]:
        self._is_open = True
        kind = _kind(part)
        call = part if isinstance(part, CallBegun) else None
        item = Item(kind, self._new_id(kind), len(self.items), call)
        item.namespace = None if call is None else self._namespaces.get(call.name)
        self.items.append(item)
        added = {"output_index": item.index, "item": item.shown("in_progress")}
        events: list[Event] = [("response.output_item.added", added)]
        if call is None:
            inner = {**_place(item), "content_index": 0, "part": item.part()}
            events.append(("response.content_part.added", inner))
        return events

    def _new_id(self, kind: str) -> str:
        if kind == "message" and self._message_ids:
            return self._message_ids.pop()
        return f"{_PREFIXES[kind]}_{uuid.uuid4().hex}"


def _kind(part: Part) -> str:
    if isinstance(part, Content):
        return "message"
    return "reasoning" if isinstance(part, Reasoning) else "function_call"


def _place(item: Item) -> dict[str, Any]:
    return {"item_id": item.item_id, "output_index": item.index}
