"""How model families write calls of tools."""

from __future__ import annotations

from collections.abc import Collection

from gateway.output.call_object import read_call
from gateway.output.parts import Format, Parts, Steps
from gateway.output.reader import Reader, Waiting

Names = Collection[str]

HERMES_BEGIN, HERMES_END = "<tool_call>", "</tool_call>"
PYTHON_TAG = "<|python_tag|>"
MISTRAL_BEGIN, MISTRAL_ARGS, MISTRAL_ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"
DEEPSEEK_CALLS, DEEPSEEK_CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
DEEPSEEK_CALL, DEEPSEEK_CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
DEEPSEEK_SEP = "<｜tool▁sep｜>"


def hermes(reader: Reader, parts: Parts) -> Steps:
    """`<tool_call>{"name": …, "arguments": …}</tool_call>`: Hermes, Qwen 2.5 and 3, and others."""
    while (yield from reader.copy_until((HERMES_BEGIN,), parts.content)):
        space = yield from reader.take_space()
        no_call = yield from read_call(reader, parts)
        if no_call is not None:
            parts.content(HERMES_BEGIN + space + no_call)
            continue
        yield from reader.take_until((HERMES_END,))


def llama(names: Names) -> Format:
    """`{"name": …, "parameters": …}`, several with `;` between, nothing else: Llama 3.

    An answer that is a JSON object without the name of a tool is an answer.
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
    # The name ends where the arguments begin, whatever is written between.
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


def deepseek(reader: Reader, parts: Parts) -> Steps:
    """`<｜tool▁call▁begin｜>…<｜tool▁sep｜>…<｜tool▁call▁end｜>`: DeepSeek V3, R1 and V3.1.

    Before V3.1 the separator stands between the word `function` and the name, and the arguments
    in a fenced block.
    """
    while (yield from reader.copy_until((DEEPSEEK_CALLS,), parts.content)):
        marker: str | None = DEEPSEEK_CALL
        while marker == DEEPSEEK_CALL:
            _, marker = yield from reader.take_until((DEEPSEEK_CALL, DEEPSEEK_CALLS_END))
            if marker == DEEPSEEK_CALL:
                yield from _deepseek_call(reader, parts)


def _deepseek_call(reader: Reader, parts: Parts) -> Waiting[None]:
    name, marker = yield from reader.take_until((DEEPSEEK_SEP, DEEPSEEK_CALL_END))
    if marker != DEEPSEEK_SEP:
        return
    if name.strip() == "function" and (yield from reader.peek()) not in ("{", ""):
        name, _ = yield from reader.take_until(("\n",))
        yield from reader.take_until(("```",))
        yield from reader.take("json")
    yield from reader.take_space()
    yield from reader.copy_json(parts.begin_call(name.strip()))
    yield from reader.take_until((DEEPSEEK_CALL_END,))


def tool_format(family: str, names: Names) -> Format:
    """Returns the format of a family.

    Args:
        names: of the tools. An answer that only looks like a call calls none of them.
    """
    formats: dict[str, Format] = {
        "hermes": hermes,
        "llama3": llama(names),
        "mistral": mistral,
        "deepseek": deepseek,
        "deepseek-v3.1": deepseek,
    }
    return formats[family]
