"""A call that a model writes as one JSON object: `{"name": …, "arguments": …}`, in any order."""

from __future__ import annotations

import json
from collections.abc import Callable

from gateway.output.parts import Parts
from gateway.output.reader import Emit, Reader, Waiting

_ARGUMENT_KEYS = ("arguments", "parameters")


def read_call(
    reader: Reader, parts: Parts, is_tool: Callable[[str], bool] = lambda name: True
) -> Waiting[str | None]:
    """Reads the object that comes next and adds its call as soon as the name is known.

    Returns:
        None for a call. The text so far, when it turns out to be none: it is no object, or has no
        name, or one that is no tool's. What is malformed after the name ends the arguments there.
    """
    seen: list[str] = []
    early: list[str] = []  # arguments that came before the name
    has_arguments = False
    emit: Emit | None = None
    if not (yield from _take(reader, "{", seen)):
        return "".join(seen)
    while True:
        key = yield from _key(reader, seen)
        if key is None:
            break
        if key == "name" and emit is None:
            written = yield from reader.take_json()
            seen.append(written)
            name = _text_of(written)
            if name is None or not is_tool(name):
                break
            emit = parts.begin_call(name)
            for text in early:
                emit(text)
        elif key in _ARGUMENT_KEYS and not has_arguments:
            has_arguments = True
            yield from _arguments(reader, seen, early.append if emit is None else emit)
        else:
            seen.append((yield from reader.take_json()))
        if not (yield from _take(reader, ",", seen)):
            yield from _take(reader, "}", seen)
            break
    if emit is None:
        return "".join(seen)
    if not has_arguments:
        emit("{}")
    return None


def _arguments(reader: Reader, seen: list[str], emit: Emit) -> Waiting[None]:
    """Hands on the arguments as written; when they are JSON within a string, what it holds."""
    if (yield from reader.peek()) == '"':
        written = yield from reader.take_json()
        seen.append(written)
        emit(_text_of(written) or "")
        return

    def both(text: str) -> None:
        seen.append(text)
        emit(text)

    yield from reader.copy_json(both)


def _key(reader: Reader, seen: list[str]) -> Waiting[str | None]:
    """Reads `"key":` with the space around; None when something else comes."""
    seen.append((yield from reader.take_space()))
    if (yield from reader.peek()) != '"':
        yield from _take(reader, "}", seen)
        return None
    written = yield from reader.take_json()
    seen.append(written)
    if not (yield from _take(reader, ":", seen)):
        return None
    seen.append((yield from reader.take_space()))
    return _text_of(written)


def _take(reader: Reader, text: str, seen: list[str]) -> Waiting[bool]:
    seen.append((yield from reader.take_space()))
    if not (yield from reader.take(text)):
        return False
    seen.append(text)
    return True


def _text_of(written: str) -> str | None:
    """Returns what a JSON string says; None for anything else."""
    try:
        value = json.loads(written)
    except ValueError:
        return None
    return value if isinstance(value, str) else None
