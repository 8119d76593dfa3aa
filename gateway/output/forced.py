"""Grammars under which a call of a tool is one: of a known tool, with arguments of its schema.

Written as structural tags in XGrammar's form, which the target compiles.
"""

from __future__ import annotations

import json

from gateway.output import tool_formats as marks
from gateway.output.forced_arguments import python_arguments, tagged_arguments
from gateway.output.harmony import CHANNEL, MESSAGE, START
from gateway.output.reasoning import ThinkTags
from gateway.output.structure import ANY_TEXT, Tag, any_of, json_schema, regex, sequence, tag, text
from gateway.output.tagged_calls import FAMILIES, Tags
from gateway.output.tools import Tool, Toolbox, ToolUse
from shared.grammar import Grammar, GrammarKind

_SEPARATORS = {
    "hermes": "\n",
    "qwen3-coder": "\n",
    "seed-oss": "\n",
    "glm45": "\n",
    "llama3": "; ",
    "mistral": ", ",
    "pythonic": ", ",
    "deepseek": "\n",
}
# What stands around all calls of an answer.
_SECTIONS = {
    "mistral": (f"{marks.MISTRAL_BEGIN}[", "]"),
    "pythonic": ("[", "]"),
    "deepseek": (marks.DEEPSEEK_CALLS, marks.DEEPSEEK_CALLS_END),
    "deepseek-v3.1": (marks.DEEPSEEK_CALLS, marks.DEEPSEEK_CALLS_END),
    "kimi-k2": (marks.KIMI_CALLS, marks.KIMI_CALLS_END),
    "minimax-m2": ("<minimax:tool_call>\n", "</minimax:tool_call>"),
}
# What tells a call, or all calls, from free text.
_TRIGGERS = {
    "hermes": marks.HERMES_BEGIN,
    "qwen3-coder": "<tool_call>",
    "seed-oss": "<seed:tool_call>",
    "glm45": "<tool_call>",
    "minimax-m2": "<minimax:tool_call>",
    "deepseek": marks.DEEPSEEK_CALLS,
    "deepseek-v3.1": marks.DEEPSEEK_CALLS,
    "kimi-k2": marks.KIMI_CALLS,
}
FAMILIES_WITH_TRIGGERS = frozenset(_TRIGGERS)


def calls_format(family: str, toolbox: Toolbox) -> Tag:
    """Returns the format of one call or more, in the way of a family.

    Raises:
        InvalidArgument: the family cannot be held to a tool's schema.
    """
    is_single = not toolbox.is_parallel or toolbox.forced_name is not None or family == "harmony"
    calls = _calls(family, toolbox.callable_tools, is_single=is_single)
    begin, end = _SECTIONS.get(family, ("", ""))
    return sequence(text(begin), calls, text(end)) if begin else calls


def strict_format(family: str, toolbox: Toolbox) -> Tag | None:
    """Returns free text in which calls of tools keep to their schemas; None where none is strict,
    or nothing tells a call of the family from text.

    Raises:
        InvalidArgument: the family cannot be held to a tool's schema.
    """
    trigger = _TRIGGERS.get(family)
    if trigger is None or not any(tool.is_strict for tool in toolbox.tools):
        return None
    if family in _SECTIONS:
        begin, end = _SECTIONS[family]
        tags = [tag(begin, _calls(family, toolbox.tools, is_single=not toolbox.is_parallel), end)]
    else:
        tags = [_call(family, tool) for tool in toolbox.tools]
    return {"type": "triggered_tags", "triggers": [trigger], "tags": tags}


def _calls(family: str, tools: tuple[Tool, ...], *, is_single: bool) -> Tag:
    return {
        "type": "tags_with_separator",
        "tags": [_call(family, tool) for tool in tools],
        "separator": _SEPARATORS.get(family, ""),
        "at_least_one": True,
        "stop_after_first": is_single,
    }


def tool_format(family: str, toolbox: Toolbox) -> Tag | None:
    """Returns what the answer must match because of its tools; None where it is free."""
    if toolbox.use is ToolUse.REQUIRED:
        return calls_format(family, toolbox)
    return strict_format(family, toolbox)


def format_of(grammar: Grammar) -> Tag | None:
    """Returns a grammar as a part of a structural tag; None for a kind that cannot be one."""
    if grammar.kind is GrammarKind.JSON_SCHEMA:
        return {"type": "json_schema", "json_schema": json.loads(grammar.text)}  # may be `true`
    if grammar.kind is GrammarKind.REGEX:
        return regex(grammar.text)
    if grammar.kind is GrammarKind.CHOICES:
        return any_of([text(choice) for choice in grammar.source])
    if grammar.kind is GrammarKind.STRUCTURAL_TAG:
        tag = json.loads(grammar.text)
        inner = tag.get("format") if isinstance(tag, dict) else None
        return inner if isinstance(inner, dict) else None
    return None


def after_thinking(answer: Tag, tags: ThinkTags, *, starts_inside: bool) -> Tag:
    """Returns the format of reasoning between tags, which is free, then the answer."""
    begin = "" if starts_inside else tags.begin
    thought = sequence(tag(begin, ANY_TEXT, tags.end), regex(r"\s{0,4}"), answer)
    return thought if starts_inside else any_of([thought, answer])


def final_message(answer: Tag) -> Tag:
    """Returns an answer of harmony that is no call, with its header."""
    return sequence(text(f"{CHANNEL}final{MESSAGE}"), answer)


def after_analysis(answer: Tag) -> Tag:
    """Returns the same for harmony: a message of analysis, or none, then the answer.

    Args:
        answer: with its header.
    """
    end = f"<|end|>{START}assistant"
    thought = sequence(tag(f"{CHANNEL}analysis{MESSAGE}", ANY_TEXT, end), answer)
    return any_of([thought, answer])


def structural_tag(content: Tag) -> Grammar:
    """Returns the grammar of a format."""
    whole = {"type": "structural_tag", "format": content}
    return Grammar.of(GrammarKind.STRUCTURAL_TAG, json.dumps(whole, ensure_ascii=False))


def _call(family: str, tool: Tool) -> Tag:
    tags = FAMILIES.get(family)
    if tags is not None:
        return _tagged_call(tags, tool, has_section=family in _SECTIONS)
    if family == "pythonic":
        return tag(f"{tool.name}(", python_arguments(tool), ")")
    arguments = json_schema(tool.schema)
    if family == "kimi-k2":
        number = regex("[0-9]{1,4}")
        content = sequence(number, text(marks.KIMI_ARGS), arguments)
        return tag(f"{marks.KIMI_CALL}functions.{tool.name}:", content, marks.KIMI_CALL_END)
    begin, end = _frame(family, json.dumps(tool.name))
    return tag(begin, arguments, end)


def _tagged_call(tags: Tags, tool: Tool, *, has_section: bool) -> Tag:
    """Returns one call.

    Args:
        has_section: all calls are in one section, or else each in one of its own.
    """
    # Line breaks end what is whole: as separators they would begin like what may follow.
    begin, end = ("", "\n") if has_section else (f"{tags.begin}\n", f"\n{tags.end}")
    arguments = tagged_arguments(tags, tool)
    if not tags.call_end:
        return tag(f"{tags.begin}{tool.name}", sequence(regex("\n?"), arguments), tags.end)
    head = f"{begin}{tags.before_name}{tool.name}{tags.after_name}\n"
    return tag(head, arguments, f"{tags.call_end}{end}")


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
