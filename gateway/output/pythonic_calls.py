"""Calls written as Python, `[name(key=value, …), …]` and nothing else: Llama 4 and Llama 3.2."""

from __future__ import annotations

import json
import re
from collections.abc import Collection

from gateway.output.arguments import ArgumentWriter, literal_value
from gateway.output.parser import Format, Parts, Reader, Steps, Waiting

PYTHON_TAG = "<|python_tag|>"
PYTHON_START, PYTHON_END = "<|python_start|>", "<|python_end|>"
_AFTER_NAME = re.compile(r"[^\w.-]")
_STRUCTURE = re.compile(r"""["'()\[\]{},]""")
_IN_STRING = {'"': re.compile(r'["\\]'), "'": re.compile(r"['\\]")}


def pythonic(names: Collection[str]) -> Format:
    """Returns the format.

    Values are literals; nothing is evaluated. A list of anything but tool calls is an answer. A
    call begins with its first argument. Malformed text after that leaves the arguments unclosed and
    becomes content.

    Args:
        names: names of the tools.
    """

    def read(reader: Reader, parts: Parts) -> Steps:
        seen = yield from reader.take_space()
        for mark in (PYTHON_START, PYTHON_TAG):
            if (yield from reader.take(mark)):
                seen = yield from reader.take_space()
        if (yield from reader.take("[")):
            yield from _calls(reader, parts, names, f"{seen}[")
        else:
            parts.content(seen)
        yield from reader.copy_until((), parts.content)

    return read


def _calls(reader: Reader, parts: Parts, names: Collection[str], seen: str) -> Waiting[None]:
    while True:
        seen += yield from reader.take_space()
        no_call = yield from _call(reader, parts, names, seen)
        if no_call is not None:
            parts.content(no_call)
            return
        seen = yield from reader.take_space()
        if not (yield from reader.take(",")):
            break
        seen += ","
    if not (yield from reader.take("]")):
        parts.content(seen)
        return
    seen = yield from reader.take_space()
    if not (yield from reader.take(PYTHON_END)):
        parts.content(seen)


def _call(reader: Reader, parts: Parts, names: Collection[str], seen: str) -> Waiting[str | None]:
    """Returns None for a complete call, else the text that turned out to be no call.

    Args:
        seen: the text before the call, which then is no call either.
    """
    name = yield from reader.take_to(_AFTER_NAME)
    seen += name
    if name not in names or not (yield from reader.take("(")):
        return seen
    writer: ArgumentWriter | None = None
    seen += "("
    while True:
        seen += yield from reader.take_space()
        if (yield from reader.take(")")):
            (writer or ArgumentWriter(parts.begin_call(name))).end()
            return None
        key = yield from reader.take_to(_AFTER_NAME)
        seen += key + (yield from reader.take_space())
        if not key or not (yield from reader.take("=")):
            return seen
        written = yield from _literal(reader)
        try:
            value = json.dumps(literal_value(written), ensure_ascii=False)
        except ValueError:
            return f"{seen}={written}"
        if (yield from reader.peek()) not in (",", ")"):
            return f"{seen}={written}"
        writer = writer or ArgumentWriter(parts.begin_call(name))
        writer.key(key)
        writer.value(value)
        seen = "," if (yield from reader.take(",")) else ""


def _literal(reader: Reader) -> Waiting[str]:
    """Returns the text up to the comma or bracket that ends a value."""
    text, depth = "", 0
    while True:
        text += yield from reader.take_to(_STRUCTURE)
        character = yield from reader.peek()
        if not character or (depth == 0 and character in ",)]}"):
            return text
        yield from reader.take(character)
        text += character
        if character in _IN_STRING:
            text += yield from _string(reader, character)
        elif character in "([{":
            depth += 1
        elif character in ")]}":
            depth -= 1


def _string(reader: Reader, quote: str) -> Waiting[str]:
    """Returns the rest of a string, after its opening quote."""
    text = ""
    while True:
        text += yield from reader.take_to(_IN_STRING[quote])
        character = yield from reader.peek()
        yield from reader.take(character)
        text += character
        if character in (quote, ""):
            return text
        escaped = yield from reader.peek()
        yield from reader.take(escaped)
        text += escaped
