"""Grammars under which a call of a tool is one: of a known tool, with arguments of its schema.

Written as structural tags in XGrammar's form, which the target compiles.
"""

from __future__ import annotations

import json
from typing import Any

from gateway.output import tool_formats as marks
from gateway.output.harmony import CHANNEL, MESSAGE, START
from gateway.output.reasoning import THINK, THINK_END
from gateway.output.tools import Tool, Toolbox, ToolUse
from shared.grammar import Grammar, GrammarKind

Tag = dict[str, Any]
_ANY_TEXT: Tag = {"type": "any_text"}


def calls_format(family: str, toolbox: Toolbox) -> Tag:
    """Returns the format of one call or more, in the way of a family."""
    tags = [_call(family, tool) for tool in toolbox.callable_tools]
    separator = {"hermes": "\n", "llama3": "; ", "mistral": ", ", "deepseek": "\n"}.get(family, "")
    is_single = not toolbox.is_parallel or toolbox.forced_name is not None or family == "harmony"
    calls: Tag = {
        "type": "tags_with_separator",
        "tags": tags,
        "separator": separator,
        "at_least_one": True,
        "stop_after_first": is_single,
    }
    if family == "mistral":
        return _sequence(_text(f"{marks.MISTRAL_BEGIN}["), calls, _text("]"))
    if family.startswith("deepseek"):
        return _sequence(_text(marks.DEEPSEEK_CALLS), calls, _text(marks.DEEPSEEK_CALLS_END))
    return calls


def strict_format(family: str, toolbox: Toolbox) -> Tag | None:
    """Returns free text in which calls of tools keep to their schemas; None where none is strict,
    or nothing tells a call of the family from text."""
    trigger = marks.DEEPSEEK_CALL if family.startswith("deepseek") else None
    trigger = marks.HERMES_BEGIN if family == "hermes" else trigger
    if trigger is None or not any(tool.is_strict for tool in toolbox.tools):
        return None
    tags = [_call(family, tool) for tool in toolbox.tools]
    return {"type": "triggered_tags", "triggers": [trigger], "tags": tags}


def tool_format(family: str, toolbox: Toolbox) -> Tag | None:
    """Returns what the answer must match because of its tools; None where it is free."""
    if toolbox.use is ToolUse.REQUIRED:
        return calls_format(family, toolbox)
    return strict_format(family, toolbox)


def format_of(grammar: Grammar) -> Tag | None:
    """Returns a grammar as a part of a structural tag; None for a kind that cannot be one."""
    if grammar.kind is GrammarKind.JSON_SCHEMA:
        return {"type": "json_schema", "json_schema": json.loads(grammar.text)}
    if grammar.kind is GrammarKind.REGEX:
        return {"type": "regex", "pattern": grammar.text}
    if grammar.kind is GrammarKind.CHOICES:
        return {"type": "or", "elements": [_text(text) for text in grammar.source]}
    return None


def after_thinking(answer: Tag, *, starts_inside: bool) -> Tag:
    """Returns the format of reasoning between `<think>` tags, which is free, then the answer."""
    begin = "" if starts_inside else THINK
    space: Tag = {"type": "regex", "pattern": r"\s{0,4}"}
    thought = _sequence(_tag(begin, _ANY_TEXT, THINK_END), space, answer)
    return thought if starts_inside else {"type": "or", "elements": [thought, answer]}


def after_analysis(answer: Tag, *, is_call: bool) -> Tag:
    """Returns the same for harmony: a message of analysis, or none, then the answer.

    Args:
        is_call: the answer is a call, with a header of its own.
    """
    header = CHANNEL if is_call else f"{CHANNEL}final{MESSAGE}"
    answer = answer if is_call else _sequence(_text(header), answer)
    end = f"<|end|>{START}assistant"
    thought = _sequence(_tag(f"{CHANNEL}analysis{MESSAGE}", _ANY_TEXT, end), answer)
    return {"type": "or", "elements": [thought, answer]}


def structural_tag(content: Tag) -> Grammar:
    """Returns the grammar of a format."""
    tag = {"type": "structural_tag", "format": content}
    return Grammar.of(GrammarKind.STRUCTURAL_TAG, json.dumps(tag, ensure_ascii=False))


def _call(family: str, tool: Tool) -> Tag:
    begin, end = _frame(family, json.dumps(tool.name))
    return _tag(begin, {"type": "json_schema", "json_schema": dict(tool.schema)}, end)


def _frame(family: str, name: str) -> tuple[str, str]:
    """Returns what stands before and after the arguments.

    Args:
        name: as a JSON string.
    """
    bare = name[1:-1]
    if family == "hermes":
        begin = f'{marks.HERMES_BEGIN}\n{{"name": {name}, "arguments": '
        return begin, f"}}\n{marks.HERMES_END}"
    if family == "llama3":
        return f'{{"name": {name}, "parameters": ', "}"
    if family == "mistral":
        return f'{{"name": {name}, "arguments": ', "}"
    if family == "deepseek":
        begin = f"{marks.DEEPSEEK_CALL}function{marks.DEEPSEEK_SEP}{bare}\n```json\n"
        return begin, f"\n```{marks.DEEPSEEK_CALL_END}"
    if family == "deepseek-v3.1":
        return f"{marks.DEEPSEEK_CALL}{bare}{marks.DEEPSEEK_SEP}", marks.DEEPSEEK_CALL_END
    # Nothing may follow the arguments, so the output ends there; the end token is not needed.
    return f"{CHANNEL}commentary to=functions.{bare} <|constrain|>json{MESSAGE}", ""


def _tag(begin: str, content: Tag, end: str) -> Tag:
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def _text(value: str) -> Tag:
    return {"type": "const_string", "value": value}


def _sequence(*elements: Tag) -> Tag:
    return {"type": "sequence", "elements": list(elements)}
