"""Answers of `/v1/responses`: their output items, as one object and as events of a stream."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from gateway.bodies import chat_logprobs, metrics, timings, usage
from gateway.choice import Choice, FinalChoice, Piece, check_field
from gateway.event_stream import named_event
from gateway.failures import Problem
from gateway.generation import fingerprint
from gateway.output.parser import CallBegun, Content, Part, Reasoning
from gateway.responses.chat import ResponsePlan
from gateway.responses.schema import ResponsesRequest
from shared.errors import OutriderError
from shared.text import Tokenizer
from shared.tokens import FinishReason

Event = tuple[str, dict[str, Any]]
Logprobs = list[dict[str, Any]]

_TEXT_TYPES = {"message": "output_text", "reasoning": "reasoning_text"}
_PREFIXES = {"message": "msg", "reasoning": "rs", "function_call": "fc"}


@dataclass(slots=True)
class Item:
    """One output item, as far as it has been generated.

    Attributes:
        call: the id and name of a function call; None for other kinds of items.
        logprobs: log probabilities of a message's text.
        namespace: the namespace of the called tool and its name there; None without a namespace.
    """

    kind: str
    item_id: str
    index: int
    call: CallBegun | None = None
    text: str = ""
    logprobs: Logprobs = field(default_factory=list)
    namespace: tuple[str, str] | None = None

    def as_json(self, status: str) -> dict[str, Any]:
        """Returns the item as JSON. An item in progress is shown without its content."""
        is_over = status != "in_progress"
        if self.call is not None:
            fields = {
                "id": self.item_id,
                "type": "function_call",
                "call_id": self.call.call_id,
                "name": self.call.name,
                "arguments": self.text if is_over else "",
                "status": status,
            }
            if self.namespace is None:
                return fields
            namespace, name = self.namespace
            return {**fields, "namespace": namespace, "name": name}
        fields = {"id": self.item_id, "type": self.kind, "status": status}
        content = [self.part()] if is_over else []
        if self.kind == "reasoning":
            return {**fields, "summary": [], "content": content}
        return {**fields, "role": "assistant", "content": content}

    def part(self) -> dict[str, Any]:
        """Returns the single content part of a message or of reasoning."""
        if self.kind == "reasoning":
            return {"type": "reasoning_text", "text": self.text}
        return {
            "type": "output_text",
            "text": self.text,
            "annotations": [],
            "logprobs": self.logprobs,
        }


class Items:
    """Opens, fills and closes output items as the parts of an output arrive.

    Args:
        message_id: item id of the first message.
        namespaces: the namespace of a tool and its name there, by the tool's flat name.
    """

    def __init__(self, message_id: str, namespaces: Mapping[str, tuple[str, str]]) -> None:
        self._namespaces = namespaces
        self._message_ids = [message_id]
        self.items: list[Item] = []
        self._is_open = False

    def open_message(self) -> list[Event]:
        """Opens a message that has no text yet."""
        return self._open(Content(""))

    def add(self, parts: Sequence[Part], logprobs: Logprobs) -> list[Event]:
        """Adds parts of the output and returns their events.

        Args:
            logprobs: log probabilities of the text in these parts.
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

    def add_logprobs(self, logprobs: Logprobs) -> None:
        """Adds log probabilities of tokens that have no text."""
        if self._is_open and self.items[-1].kind == "message":
            self.items[-1].logprobs += logprobs

    def close(self, status: str) -> list[Event]:
        """Closes the open item, if there is one, and returns its last events."""
        if not self._is_open:
            return []
        self._is_open = False
        item = self.items[-1]
        position = _position(item)
        done_item = {"output_index": item.index, "item": item.as_json(status)}
        done: list[Event] = [("response.output_item.done", done_item)]
        if item.call is not None:
            call = {**position, "name": item.as_json(status)["name"], "arguments": item.text}
            return [("response.function_call_arguments.done", call), *done]
        part_position = {**position, "content_index": 0}
        text: dict[str, Any] = {**part_position, "text": item.text}
        if item.kind == "message":
            text["logprobs"] = item.logprobs
        return [
            (f"response.{_TEXT_TYPES[item.kind]}.done", text),
            ("response.content_part.done", {**part_position, "part": item.part()}),
            *done,
        ]

    def _fill(self, item: Item, text: str, logprobs: Logprobs) -> list[Event]:
        item.text += text
        position = _position(item)
        if item.call is not None:
            return [("response.function_call_arguments.delta", {**position, "delta": text})]
        delta: dict[str, Any] = {**position, "content_index": 0, "delta": text}
        if item.kind == "message":
            item.logprobs += logprobs
            delta["logprobs"] = logprobs
        return [(f"response.{_TEXT_TYPES[item.kind]}.delta", delta)]

    def _open(self, part: Part) -> list[Event]:
        self._is_open = True
        kind = _kind(part)
        call = part if isinstance(part, CallBegun) else None
        item = Item(kind, self._new_id(kind), len(self.items), call)
        item.namespace = None if call is None else self._namespaces.get(call.name)
        self.items.append(item)
        added = {"output_index": item.index, "item": item.as_json("in_progress")}
        events: list[Event] = [("response.output_item.added", added)]
        if call is None:
            part_added = {**_position(item), "content_index": 0, "part": item.part()}
            events.append(("response.content_part.added", part_added))
        return events

    def _new_id(self, kind: str) -> str:
        if kind == "message" and self._message_ids:
            return self._message_ids.pop()
        return f"{_PREFIXES[kind]}_{uuid.uuid4().hex}"


def _kind(part: Part) -> str:
    if isinstance(part, Content):
        return "message"
    return "reasoning" if isinstance(part, Reasoning) else "function_call"


def _position(item: Item) -> dict[str, Any]:
    return {"item_id": item.item_id, "output_index": item.index}


class ResponseEncoder:
    """`/v1/responses`: the items and the body of one response; its events, numbered from 0.

    Args:
        on_end: called with the body of the response when it has ended.
    """

    def __init__(
        self,
        plan: ResponsePlan,
        tokenizer: Tokenizer,
        on_end: Callable[[dict[str, Any]], None] | None = None,
    ) -> None:
        self._plan = plan
        self._tokenizer = tokenizer
        self._on_end = on_end
        self._items = Items(plan.item_id, plan.namespaces)
        self._status = "completed"
        self._number = 0

    def opening(self, choice: Choice) -> bytes:
        response = {"response": self.response()}
        events = [("response.created", response), ("response.in_progress", response)]
        if self._plan.chat.text.output is None:  # neither reasoning nor a call can come first
            events += self._items.open_message()
        return self._events(events)

    def news(self, choice: Choice) -> bytes:
        piece = choice.take()
        return b"" if piece is None else self._events(self._add(piece))

    def closing(self, choices: tuple[Choice, ...]) -> bytes:
        (choice,) = choices
        events, response = self._close(choice)
        return self._events(events) + self.ended(response)

    def ended(self, response: dict[str, Any]) -> bytes:
        """Returns the last event of the stream, with the final status."""
        status = response["status"]
        kind = "failed" if status == "cancelled" else status  # OpenAI has no "cancelled" event
        return self._events([(f"response.{kind}", {"response": response})])

    def failure(self, error: OutriderError) -> bytes:
        problem = Problem.of(error)
        fields = {"code": problem.code, "message": problem.message, "param": problem.param}
        return self._events([("error", fields)])

    def whole(self, choices: Sequence[FinalChoice]) -> dict[str, Any]:
        (final,) = choices
        self._add(final.piece)
        return self._close(final.choice)[1]

    @property
    def message_text(self) -> str:
        """The text of all messages in the output."""
        return "".join(item.text for item in self._items.items if item.kind == "message")

    def response(self, choice: Choice | None = None) -> dict[str, Any]:
        """Returns the body of the response.

        Args:
            choice: the finished choice; None while the response is in progress.
        """
        plan, body = self._plan, self._plan.body
        sampling = plan.chat.generations[0].sampling
        response: dict[str, Any] = {
            "id": plan.chat.request_id,
            "object": "response",
            "created_at": plan.chat.created,
            "status": "in_progress",
            "background": body.background,
            "completed_at": None,
            "conversation": body.conversation_id and {"id": body.conversation_id},
            "error": None,
            "incomplete_details": None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata or {},
            "model": plan.chat.model.name,
            "output": [],
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": body.previous_response_id,
            "prompt_cache_key": body.prompt_cache_key,
            "reasoning": _reasoning(body),
            "safety_identifier": body.safety_identifier,
            "service_tier": body.service_tier and "default",
            "store": plan.history.is_stored,
            "system_fingerprint": fingerprint(plan.chat.model),
            "temperature": sampling.temperature,
            "text": _text(body),
            "tool_choice": _tool_choice(body),
            "tools": [tool.model_dump(exclude_none=True) for tool in body.tools or ()],
            "top_logprobs": body.top_logprobs or 0,
            "top_p": sampling.top_p,
            "truncation": "disabled",
            "usage": None,
            "user": body.user,
            "metrics": None,
            "timings": None,
        }
        return response if choice is None else response | self._final_fields(choice)

    def _add(self, piece: Piece) -> list[Event]:
        """Adds a piece of output and returns its events."""
        scores = chat_logprobs(self._plan.chat, piece.scores, self._tokenizer)
        logprobs: Logprobs = [] if scores is None else scores["content"]
        parts = piece.parts
        if not parts and piece.text:
            parts = (Content(piece.text),)
        if not parts:
            self._items.add_logprobs(logprobs)
        return self._items.add(parts, logprobs)

    def _close(self, choice: Choice) -> tuple[list[Event], dict[str, Any]]:
        """Returns the last events of the output, and the body of the response. An empty output gets
        one empty message."""
        self._status = _status(choice)
        opened = [] if self._items.items else self._items.open_message()
        events = [*opened, *self._items.close(self._status)]
        response = self.response(choice)
        if self._on_end is not None:
            self._on_end(response)
        return events, response

    def _final_fields(self, choice: Choice) -> dict[str, Any]:
        status = _status(choice)
        return {
            "status": status,
            "completed_at": int(time.time()) if status == "completed" else None,
            "incomplete_details": (
                {"reason": "max_output_tokens"} if status == "incomplete" else None
            ),
            "output": self._output(),
            "usage": self._usage(choice),
            "metrics": metrics((choice,)),
            "timings": timings(self._plan.chat, (choice,)),
            **check_field(choice),
        }

    def _output(self) -> list[dict[str, Any]]:
        """Returns the output items. Only the last one can be incomplete."""
        *completed, last = self._items.items
        return [*(item.as_json("completed") for item in completed), last.as_json(self._status)]

    def _usage(self, choice: Choice) -> dict[str, Any]:
        chat_usage = usage(self._plan.chat, (choice,))
        cached = chat_usage["prompt_tokens_details"]["cached_tokens"]
        return {
            "input_tokens": chat_usage["prompt_tokens"],
            "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
            "output_tokens": chat_usage["completion_tokens"],
            "output_tokens_details": {
                "reasoning_tokens": choice.num_reasoning_tokens,
                **chat_usage["completion_tokens_details"],
            },
            "total_tokens": chat_usage["total_tokens"],
        }

    def _events(self, events: Sequence[Event]) -> bytes:
        begin, self._number = self._number, self._number + len(events)
        return b"".join(
            [
                named_event(kind, sequence_number=number, **fields)
                for number, (kind, fields) in enumerate(events, begin)
            ]
        )


def _reasoning(body: ResponsesRequest) -> dict[str, Any]:
    reasoning = body.reasoning
    return {"effort": reasoning and reasoning.effort, "summary": reasoning and reasoning.summary}


def _text(body: ResponsesRequest) -> dict[str, Any]:
    verbosity = None if body.text is None else body.text.verbosity
    return {"format": _format(body)} | ({} if verbosity is None else {"verbosity": verbosity})


def _format(body: ResponsesRequest) -> dict[str, Any]:
    text_format = None if body.text is None else body.text.format
    if text_format is None:
        return {"type": "text"}
    return text_format.model_dump(by_alias=True, exclude_unset=True) | {"type": text_format.type}


def _tool_choice(body: ResponsesRequest) -> Any:
    choice = body.tool_choice
    return choice or "auto" if choice is None or isinstance(choice, str) else choice.model_dump()


def _status(choice: Choice) -> str:
    return "incomplete" if choice.finish_reason is FinishReason.LENGTH else "completed"
