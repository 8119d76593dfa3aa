"""The tools of one request, and the formats in which model families write calls of them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from gateway.output.argument_formats import (
    MINIMAX,
    PYTHON_END,
    PYTHON_START,
    PYTHON_TAG,
    TAGS,
    Schema,
    pythonic,
    tagged,
)
from gateway.output.parser import (
    CHANNEL,
    HARMONY_MARKS,
    MESSAGE,
    Emit,
    Format,
    Parts,
    Reader,
    Steps,
    Waiting,
    harmony,
)
from shared.errors import InvalidArgument

_ARGUMENT_KEYS = ("arguments", "parameters")

Names = Collection[str]
HERMES_BEGIN, HERMES_END = "<tool_call>", "</tool_call>"
MISTRAL_BEGIN, MISTRAL_ARGS, MISTRAL_ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"
DEEPSEEK_CALLS, DEEPSEEK_CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
DEEPSEEK_CALL, DEEPSEEK_CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
DEEPSEEK_SEP = "<｜tool▁sep｜>"
KIMI_CALLS, KIMI_CALLS_END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
KIMI_CALL, KIMI_CALL_END = "<|tool_call_begin|>", "<|tool_call_end|>"
KIMI_ARGS = "<|tool_call_argument_begin|>"
_KIMI_ID = re.compile(r"(?:functions\.)?([\w.-]+?)(?::\d+)?")
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,128}")
_MAX_TOOLS = 256


def read_call(
    reader: Reader, parts: Parts, is_tool: Callable[[str], bool] = lambda name: True
) -> Waiting[str | None]:
    """Reads the next JSON object and adds its call as soon as the name is known.

    Returns:
        None for a call. Otherwise the text read so far: it is not an object, or has no name, or not
        the name of a tool. Malformed text after the name ends the arguments there.
    """
    early: list[str] = []  # arguments that came before the name
    has_arguments = False
    emit: Emit | None = None
    reader.mark()
    key = (yield from _key(reader)) if (yield from _take(reader, "{")) else None
    while key is not None:
        if key == "name" and emit is None:
            name = _text_of((yield from reader.take_json()))
            if name is None or not is_tool(name):
                break
            emit = parts.begin_call(name)
            for text in early:
                emit(text)
        elif key in _ARGUMENT_KEYS and not has_arguments:
            has_arguments = True
            yield from _arguments(reader, early.append if emit is None else emit)
        else:
            yield from reader.take_json()
        if not (yield from _take(reader, ",")):
            yield from _take(reader, "}")
            break
        key = yield from _key(reader)
    seen = reader.seen()
    if emit is None:
        return seen
    if not has_arguments:
        emit("{}")
    return None


def _arguments(reader: Reader, emit: Emit) -> Waiting[None]:
    """Passes the arguments to `emit` as written, or the content of a string that holds them."""
    if (yield from reader.peek()) == '"':
        emit(_text_of((yield from reader.take_json())) or "")
    else:
        yield from reader.copy_json(emit)


def _key(reader: Reader) -> Waiting[str | None]:
    """Reads `"key":` and the white space around it; None when something else comes."""
    yield from reader.take_space()
    if (yield from reader.peek()) != '"':
        yield from _take(reader, "}")
        return None
    written = yield from reader.take_json()
    if not (yield from _take(reader, ":")):
        return None
    yield from reader.take_space()
    return _text_of(written)


def _take(reader: Reader, text: str) -> Waiting[bool]:
    """Reads past white space and `text` if it comes next; returns whether it came next."""
    yield from reader.take_space()
    return (yield from reader.take(text))


def _text_of(written: str) -> str | None:
    """Returns the value of a JSON string; None for anything else."""
    try:
        value = json.loads(written)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, str) else None


def hermes(reader: Reader, parts: Parts) -> Steps:
    """`<tool_call>{"name": …, "arguments": …}</tool_call>`: Hermes, Qwen 2.5 and 3, and others."""
    while (yield from reader.copy_until((HERMES_BEGIN,), parts.content)):
        no_call = yield from read_call(reader, parts)
        if no_call is not None:
            parts.content(HERMES_BEGIN + no_call)
            continue
        rest, marker = yield from reader.take_until((HERMES_END, HERMES_BEGIN))
        if marker == HERMES_BEGIN:  # the end was forgotten
            reader.unread(HERMES_BEGIN)
        if marker != HERMES_END and rest.strip(" \t\r\n}"):
            parts.content(rest)


def llama(names: Names) -> Format:
    """`{"name": …, "parameters": …}`, calls separated by `;`, nothing else: Llama 3.

    A JSON object without the name of a tool is a plain answer.
    """

    def read(reader: Reader, parts: Parts) -> Steps:
        space = yield from reader.take_space()
        if (yield from reader.take(PYTHON_TAG)):
            space = yield from reader.take_space()
        while (yield from reader.peek()) == "{":
            no_call = yield from read_call(reader, parts, names.__contains__)
            if no_call is not None:
                parts.content(space + no_call)
                break
            space = yield from reader.take_space()
            if not (yield from reader.take(";")):
                break
            space = yield from reader.take_space()
        else:
            parts.content(space)
        yield from reader.copy_until((), parts.content)

    return read


def mistral(reader: Reader, parts: Parts) -> Steps:
    """`[TOOL_CALLS][{…}, …]`, or `[TOOL_CALLS]name[ARGS]{…}` for each call: Mistral."""
    while (yield from reader.copy_until((MISTRAL_BEGIN,), parts.content)):
        yield from reader.take_space()
        if (yield from reader.take("[")):
            yield from _array(reader, parts)
        else:
            yield from _named(reader, parts)


def _array(reader: Reader, parts: Parts) -> Waiting[None]:
    while True:
        no_call = yield from read_call(reader, parts)
        if no_call is not None:
            parts.content(no_call)
            return
        yield from reader.take_space()
        if not (yield from reader.take(",")):
            yield from reader.take("]")
            return


def _named(reader: Reader, parts: Parts) -> Waiting[None]:
    name: list[str] = []
    # The name ends where the arguments or the next tag begin.
    while (character := (yield from reader.peek())) not in ("[", "{", ""):
        yield from reader.take(character)
        name.append(character)
    if (yield from reader.take(MISTRAL_ID)):
        yield from reader.take_until((MISTRAL_ARGS,))
    else:
        yield from reader.take(MISTRAL_ARGS)
    yield from reader.take_space()
    if not (yield from reader.peek()):
        parts.content(MISTRAL_BEGIN + "".join(name))
        return
    arguments = parts.begin_call("".join(name).strip())
    yield from reader.copy_json(arguments)


def _copy_sections(
    reader: Reader, parts: Parts, section: tuple[str, str], call: str, read: Format
) -> Steps:
    """Copies text, and reads calls in sections in which a tag stands before every call.

    Args:
        section: the tags around a section.
        call: the tag before a call.
        read: reads a call after its tag.
    """
    begin, end = section
    while (yield from reader.copy_until((begin,), parts.content)):
        marker: str | None = call
        while marker == call:
            between, marker = yield from reader.take_until((call, end))
            if between.strip():
                parts.content(between)
            if marker == call:
                yield from read(reader, parts)


def deepseek(reader: Reader, parts: Parts) -> Steps:
    """`<｜tool▁call▁begin｜>…<｜tool▁sep｜>…<｜tool▁call▁end｜>`: DeepSeek V3, R1 and V3.1.

    Before V3.1 the separator is between the word `function` and the name, and the arguments are in
    a fenced block.
    """
    return _copy_sections(reader, parts, _DEEPSEEK_SECTION, DEEPSEEK_CALL, _deepseek_call)


def _deepseek_call(reader: Reader, parts: Parts) -> Waiting[None]:
    name, marker = yield from reader.take_until((DEEPSEEK_SEP, DEEPSEEK_CALL_END))
    if marker != DEEPSEEK_SEP:
        parts.content(DEEPSEEK_CALL + name + (marker or ""))
        return
    if name.strip() == "function" and (yield from reader.peek()) not in ("{", ""):
        name, _ = yield from reader.take_until(("\n",))
        yield from reader.take_until(("```",))
        yield from reader.take("json")
    yield from reader.take_space()
    yield from reader.copy_json(parts.begin_call(name.strip()))
    yield from reader.take_until((DEEPSEEK_CALL_END,))


def kimi(reader: Reader, parts: Parts) -> Steps:
    """`<|tool_call_begin|>functions.NAME:0<|tool_call_argument_begin|>{…}<|tool_call_end|>`, in a
    section: Kimi K2. The text before the arguments is the call's id, which the template needs back
    unchanged.
    """
    return _copy_sections(reader, parts, _KIMI_SECTION, KIMI_CALL, _kimi_call)


def _kimi_call(reader: Reader, parts: Parts) -> Waiting[None]:
    head, marker = yield from reader.take_until((KIMI_ARGS, KIMI_CALL_END))
    call_id = head.strip()
    match = _KIMI_ID.fullmatch(call_id)
    if marker != KIMI_ARGS or match is None:
        parts.content(KIMI_CALL + head + (marker or ""))
        return
    arguments = parts.begin_call(match[1], call_id)
    yield from reader.take_space()
    if (yield from reader.take(KIMI_CALL_END)):
        arguments("{}")
        return
    yield from reader.copy_json(arguments)
    rest, _ = yield from reader.take_until((KIMI_CALL_END,))
    if rest.strip():
        parts.content(rest)


@dataclass(frozen=True, slots=True)
class CallFamily:
    """The format of a model family's calls.

    Attributes:
        read: returns the format for the schemas of the tools' arguments by tool name.
        marks: special tokens in calls.
        frame: texts before the name, between name and arguments, and after the arguments; None
            where the arguments are not one JSON object, or the texts depend on the call.
        section: texts around all calls of an answer.
        separator: text between two calls.
        trigger: text that begins a call, or the section of calls, within free text; empty if none.
        ends_reasoning: the trigger is a single token, which reasoning cannot mention as text.
    """

    read: Callable[[Mapping[str, Schema]], Format]
    marks: tuple[str, ...]
    frame: tuple[str, str, str] | None = None
    section: tuple[str, str] | None = None
    separator: str = ""
    trigger: str = ""
    ends_reasoning: bool = False


_DEEPSEEK_SECTION = (DEEPSEEK_CALLS, DEEPSEEK_CALLS_END)
_DEEPSEEK_MARKS = (*_DEEPSEEK_SECTION, DEEPSEEK_SEP, DEEPSEEK_CALL, DEEPSEEK_CALL_END)
_KIMI_SECTION = (KIMI_CALLS, KIMI_CALLS_END)
FAMILIES: Mapping[str, CallFamily] = {
    **{
        name: CallFamily(partial(tagged, tags), tags.marks, separator="\n", trigger=tags.begin)
        for name, tags in TAGS.items()
    },
    "minimax-m2": CallFamily(
        partial(tagged, MINIMAX),
        MINIMAX.marks,
        section=(f"{MINIMAX.begin}\n", MINIMAX.end),
        trigger=MINIMAX.begin,
    ),
    "hermes": CallFamily(
        lambda _: hermes,
        (HERMES_BEGIN, HERMES_END),
        frame=(f'{HERMES_BEGIN}\n{{"name": "', '", "arguments": ', f"}}\n{HERMES_END}"),
        separator="\n",
        trigger=HERMES_BEGIN,
    ),
    "llama3": CallFamily(
        llama, (PYTHON_TAG,), frame=('{"name": "', '", "parameters": ', "}"), separator="; "
    ),
    "pythonic": CallFamily(
        pythonic, (PYTHON_TAG, PYTHON_START, PYTHON_END), section=("[", "]"), separator=", "
    ),
    "mistral": CallFamily(
        lambda _: mistral,
        (MISTRAL_BEGIN, MISTRAL_ARGS, MISTRAL_ID),
        frame=('{"name": "', '", "arguments": ', "}"),
        section=(f"{MISTRAL_BEGIN}[", "]"),
        separator=", ",
    ),
    "deepseek": CallFamily(
        lambda _: deepseek,
        _DEEPSEEK_MARKS,
        frame=(
            f"{DEEPSEEK_CALL}function{DEEPSEEK_SEP}",
            "\n```json\n",
            f"\n```{DEEPSEEK_CALL_END}",
        ),
        section=_DEEPSEEK_SECTION,
        separator="\n",
        trigger=DEEPSEEK_CALLS,
        ends_reasoning=True,
    ),
    "deepseek-v3.1": CallFamily(
        lambda _: deepseek,
        _DEEPSEEK_MARKS,
        frame=(DEEPSEEK_CALL, DEEPSEEK_SEP, DEEPSEEK_CALL_END),
        section=_DEEPSEEK_SECTION,
        trigger=DEEPSEEK_CALLS,
        ends_reasoning=True,
    ),
    "kimi-k2": CallFamily(
        lambda _: kimi,
        (*_KIMI_SECTION, KIMI_ARGS, KIMI_CALL, KIMI_CALL_END),
        section=_KIMI_SECTION,
        trigger=KIMI_CALLS,
        ends_reasoning=True,
    ),
    # The frame has no end: nothing may follow the arguments, so the output ends there.
    "harmony": CallFamily(
        lambda _: harmony,
        HARMONY_MARKS,
        frame=(f"{CHANNEL}commentary to=functions.", f" <|constrain|>json{MESSAGE}", ""),
    ),
}


@dataclass(frozen=True, slots=True)
class Tool:
    """A function the model may call.

    Attributes:
        schema: JSON schema of the arguments, an object.
        is_strict: arguments must match the schema even when the model is free not to call.
    """

    name: str
    description: str | None
    schema: Mapping[str, Any]
    is_strict: bool = False

    @property
    def definition(self) -> dict[str, Any]:
        """The tool as chat templates read it."""
        function: dict[str, Any] = {"name": self.name}
        if self.description is not None:
            function["description"] = self.description
        return {"type": "function", "function": {**function, "parameters": dict(self.schema)}}


@dataclass(frozen=True, slots=True)
class Toolbox:
    """The tools of a request.

    Attributes:
        must_call: the answer must be a call; else the model may call.
        forced_name: the one tool that must be called; None leaves the choice to the model.
        is_parallel: whether an answer may hold several calls.
    """

    tools: tuple[Tool, ...]
    must_call: bool = False
    forced_name: str | None = None
    is_parallel: bool = True

    @property
    def callable_tools(self) -> tuple[Tool, ...]:
        """The tools that the model may call."""
        if self.forced_name is None:
            return self.tools
        return tuple(tool for tool in self.tools if tool.name == self.forced_name)

    def check(self) -> None:
        """Raises:
        InvalidArgument: there are too many tools, a name is malformed or comes twice, or the forced
            tool is unknown.
        """
        if len(self.tools) > _MAX_TOOLS:
            message = f"tools has {len(self.tools)} tools; at most {_MAX_TOOLS} are taken"
            raise InvalidArgument.of("TOOLS_OUT_OF_RANGE", "tools", message)
        for tool in self.tools:
            if not _NAME.fullmatch(tool.name):
                message = f"a tool is named {tool.name[:80]!r}; it must match {_NAME.pattern}"
                raise InvalidArgument.of("TOOL_NAME_INVALID", "tools", message)
        names = {tool.name for tool in self.tools}
        if len(names) != len(self.tools):
            message = "tools names a tool twice"
            raise InvalidArgument.of("TOOL_NAME_INVALID", "tools", message)
        if self.forced_name is not None and self.forced_name not in names:
            message = f"tool_choice names {self.forced_name[:80]!r}, which is none of the tools"
            raise InvalidArgument.of("TOOL_UNKNOWN", "tool_choice", message)


def schema_of(parameters: Mapping[str, Any] | None) -> dict[str, Any]:
    """Returns the schema of a tool's arguments; without parameters it takes an empty object."""
    if not parameters:
        return {"type": "object", "properties": {}, "additionalProperties": False}
    return dict(parameters)


def tools_prompt(tools: Sequence[Tool]) -> str:
    """Returns a system message that describes tools, for a template that does not render them."""
    lines = "\n".join(json.dumps(tool.definition, ensure_ascii=False) for tool in tools)
    return (
        "You may call functions. Their signatures, one in a line:\n"
        f"<tools>\n{lines}\n</tools>\n"
        "To call one, answer with a JSON object of its name and arguments between tags:\n"
        '<tool_call>\n{"name": "NAME", "arguments": {…}}\n</tool_call>'
    )
