"""Grammars that allow only calls of known tools with arguments that match their schemas.

Grammars are structural tags in XGrammar's form, which the target compiles. Arguments that a model
does not write as one JSON object come in the order of the schema, each at most once and no others.
That allows less than most schemas, never more."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from gateway.output import tool_formats
from gateway.output.argument_formats import TAGS, Schema, Tags, property_schema, resolved, types_of
from gateway.output.parser import CHANNEL, MESSAGE, START, ThinkTags
from gateway.output.tool_formats import Tool, Toolbox
from shared.errors import InvalidArgument
from shared.grammar import Grammar, GrammarKind

Tag = dict[str, Any]

ANY_TEXT: Tag = {"type": "any_text"}

_DEFINITIONS = ("$defs", "definitions")
_AT_ROOT = frozenset(
    {
        *("allOf", "anyOf", "oneOf", "not", "if", "$ref", "patternProperties", "minProperties"),
        *("maxProperties", "dependentRequired", "dependentSchemas", "propertyNames"),
    }
)


def tag(begin: str, content: Tag, end: str) -> Tag:
    """Returns content between two texts; any text as content ends at the first `end`."""
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def text(value: str) -> Tag:
    """Returns the format of exactly this text."""
    return {"type": "const_string", "value": value}


def regex(pattern: str) -> Tag:
    """Returns the format of texts that a regular expression matches as a whole."""
    return {"type": "regex", "pattern": pattern}


def json_schema(schema: Mapping[str, Any]) -> Tag:
    """Returns the format of JSON that matches a schema."""
    return {"type": "json_schema", "json_schema": dict(schema)}


def sequence(*elements: Tag) -> Tag:
    """Returns the format of the elements in order."""
    return {"type": "sequence", "elements": list(elements)}


def any_of(elements: Sequence[Tag]) -> Tag:
    """Returns the format of one of the elements."""
    return {"type": "or", "elements": list(elements)}


def optional(content: Tag) -> Tag:
    """Returns the format of the content or nothing."""
    return any_of([content, text("")])


_LINE_BREAK = regex("\\n?")


def tagged_arguments(tags: Tags, tool: Tool) -> Tag:
    """Returns the format of a call's arguments: each between its tags, with a line break after it.

    Raises:
        InvalidArgument: the schema cannot be enforced in this format.
    """
    parts: list[Tag] = []
    for name, is_required in _properties(tool):
        key = f"{tags.key}{name}{tags.after_key}"
        if tags.before_value:
            value = _value(tool, name, tags.before_value, tags.value_end)
            argument = sequence(text(key), _LINE_BREAK, value, _LINE_BREAK)
        else:
            pad = "\n" if tags.is_padded else ""
            value = _value(tool, name, key + pad, tags.value_end, pad)
            argument = sequence(value, text("\n"))
        parts.append(argument if is_required else optional(argument))
    return sequence(*parts)


def python_arguments(tool: Tool) -> Tag:
    """Returns the format of `key=value, …`, required arguments first.

    Raises:
        InvalidArgument: the schema cannot be enforced in this format.
    """
    properties = sorted(_properties(tool), key=lambda argument: not argument[1])
    pairs = [sequence(text(f"{name}="), _literal(tool, name)) for name, _ in properties]
    num_required = sum(is_required for _, is_required in properties)
    if num_required:
        first, *required = pairs[:num_required]
        required = [sequence(text(", "), pair) for pair in required]
        return sequence(first, *required, *_optional_pairs(pairs[num_required:]))
    starts = [sequence(pair, *_optional_pairs(pairs[i + 1 :])) for i, pair in enumerate(pairs)]
    return optional(any_of(starts)) if starts else text("")


def _optional_pairs(pairs: list[Tag]) -> list[Tag]:
    return [optional(sequence(text(", "), pair)) for pair in pairs]


def _properties(tool: Tool) -> list[tuple[str, bool]]:
    """Returns the names of the arguments and whether each is required.

    Raises:
        InvalidArgument: the schema has keywords beside the list of arguments.
    """
    unsupported = sorted(_AT_ROOT & tool.schema.keys())
    if unsupported:
        raise _refused(tool, f"has {unsupported[0]!r} beside its properties")
    properties = tool.schema.get("properties") or {}
    required = tool.schema.get("required") or []
    names = [*properties, *(name for name in required if name not in properties)]
    return [(name, name in required) for name in names]


def _value(tool: Tool, name: str, begin: str, end: str, pad: str = "") -> Tag:
    """Returns the format of a value between its tags; strings are written without quotes.

    Args:
        pad: text before `end`; optional after any text.

    Raises:
        InvalidArgument: the schema cannot be enforced in this format.
    """
    schema = property_schema(tool.schema, name)
    branches = list(_branches(tool, name, schema, tool.schema, set()))
    if not branches:
        raise _refused(tool, f"allows no value of {name!r}")
    if ANY_TEXT in branches:
        return tag(begin, ANY_TEXT, end)
    if len(branches) > 1:
        return tag(begin, any_of(branches), pad + end)
    if branches == [_long_text(schema)]:
        # The required characters, then any text.
        return sequence(text(begin), regex(_required_characters(schema)), tag("", ANY_TEXT, end))
    return tag(begin, branches[0], pad + end)


def _branches(tool: Tool, name: str, schema: Schema, root: Schema, seen: set[int]) -> Iterator[Tag]:
    """Yields the formats in which a value may be written. `ANY_TEXT` includes all others.

    Args:
        seen: ids of the alternatives that were visited already.
    """
    if "enum" in schema or "const" in schema:
        for value in schema.get("enum") or [schema.get("const")]:
            yield text(value if isinstance(value, str) else json.dumps(value))
        return
    for key in ("anyOf", "oneOf"):
        if isinstance(schema.get(key), list):
            for branch in schema[key]:
                if isinstance(branch, Mapping) and id(branch) not in seen:
                    seen.add(id(branch))
                    yield from _branches(tool, name, resolved(branch, root), root, seen)
            return
    types = types_of(schema, root)
    if "string" in types:
        yield _bare_text(tool, name, schema)
    json_types = sorted(types - {"string"} - ({"integer"} if "number" in types else set()))
    if json_types:
        yield json_schema(_with_definitions({**schema, "type": json_types}, root))


def _bare_text(tool: Tool, name: str, schema: Schema) -> Tag:
    """Returns the format of a string without quotes. `format` is an annotation and not enforced."""
    for keyword in ("pattern", "allOf", "not", "if"):
        if keyword in schema:
            raise _refused(tool, f"has {keyword!r} for {name!r}")
    if "maxLength" in schema:
        # Text of a bounded length must not run into its closing tag.
        return regex(f"[^<]{{{schema.get('minLength', 0)},{schema['maxLength']}}}")
    return _long_text(schema) if schema.get("minLength") else ANY_TEXT


def _long_text(schema: Schema) -> Tag:
    """Returns the format of text with at least `minLength` characters."""
    return regex(f"{_required_characters(schema)}[^<]*")


def _required_characters(schema: Schema) -> str:
    """Returns a pattern of `minLength` characters; the last is not the line break before `end`."""
    return f"(.|\\n){{{schema.get('minLength', 1) - 1}}}[^\\n]"


def _literal(tool: Tool, name: str) -> Tag:
    """Returns the format of a value as a Python literal; the parser also accepts JSON there."""
    schema = property_schema(tool.schema, name)
    values = schema.get("enum") or ([schema["const"]] if "const" in schema else [])
    if values:
        return any_of([text(_python(value)) for value in values])
    if types_of(schema, tool.schema) == {"boolean"}:
        return any_of([text("True"), text("False")])
    return json_schema(_with_definitions(schema, tool.schema))


def _python(value: Any) -> str:
    """Returns an enum's value as a Python literal, strings in double quotes."""
    return json.dumps(value, ensure_ascii=False) if isinstance(value, str) else repr(value)


def _with_definitions(schema: Schema, root: Schema) -> Mapping[str, Any]:
    return {**{key: root[key] for key in _DEFINITIONS if key in root}, **schema}


def _refused(tool: Tool, what: str) -> InvalidArgument:
    message = (
        f"the schema of the tool {tool.name!r} {what}; calls of this model write each argument by "
        "itself and cannot be held to that: leave tool_choice auto and strict off"
    )
    return InvalidArgument.of("TOOL_SCHEMA_UNSUPPORTED", "tools", message)


def calls_format(family: str, toolbox: Toolbox) -> Tag:
    """Returns the format of one or more calls of a model family.

    Raises:
        InvalidArgument: a tool's schema cannot be enforced in the family's format.
    """
    is_single = not toolbox.is_parallel or toolbox.forced_name is not None or family == "harmony"
    calls = _calls(family, toolbox.callable_tools, is_single=is_single)
    section = tool_formats.FAMILIES[family].section
    return sequence(text(section[0]), calls, text(section[1])) if section else calls


def strict_format(family: str, toolbox: Toolbox) -> Tag | None:
    """Returns the format of free text whose calls match the tools' schemas. None where no tool is
    strict, or the family has no trigger that tells a call from text.

    Raises:
        InvalidArgument: a tool's schema cannot be enforced in the family's format.
    """
    call_family = tool_formats.FAMILIES[family]
    if not call_family.trigger or not any(tool.is_strict for tool in toolbox.tools):
        return None
    if call_family.section is not None:
        begin, end = call_family.section
        tags = [tag(begin, _calls(family, toolbox.tools, is_single=not toolbox.is_parallel), end)]
    else:
        tags = [_call(family, tool) for tool in toolbox.tools]
    return {"type": "triggered_tags", "triggers": [call_family.trigger], "tags": tags}


def _calls(family: str, tools: tuple[Tool, ...], *, is_single: bool) -> Tag:
    return {
        "type": "tags_with_separator",
        "tags": [_call(family, tool) for tool in tools],
        "separator": tool_formats.FAMILIES[family].separator,
        "at_least_one": True,
        "stop_after_first": is_single,
    }


def format_of(grammar: Grammar) -> Tag | None:
    """Returns a grammar as a part of a structural tag; None for a kind that cannot be a part.

    Raises:
        InvalidArgument: it has to be JSON and is not.
    """
    if grammar.kind is GrammarKind.JSON_SCHEMA:
        return {"type": "json_schema", "json_schema": _parsed(grammar)}  # may be `true`
    if grammar.kind is GrammarKind.REGEX:
        return regex(grammar.text)
    if grammar.kind is GrammarKind.CHOICES:
        return any_of([text(choice) for choice in grammar.source])
    if grammar.kind is GrammarKind.STRUCTURAL_TAG:
        tag = _parsed(grammar)
        inner = tag.get("format") if isinstance(tag, dict) else None
        return inner if isinstance(inner, dict) else None
    return None


def _parsed(grammar: Grammar) -> Any:
    try:
        return json.loads(grammar.text)
    except (ValueError, RecursionError) as error:
        message = f"grammar is {grammar.text[:64]!r}, which is not JSON: {error}"
        raise InvalidArgument.of("GRAMMAR_INVALID", "grammar", message) from error


def after_thinking(answer: Tag, tags: ThinkTags, *, starts_inside: bool) -> Tag:
    """Returns the format of any reasoning between its tags, then the answer."""
    begin = "" if starts_inside else tags.begin
    with_reasoning = sequence(tag(begin, ANY_TEXT, tags.end), regex(r"\s{0,4}"), answer)
    return with_reasoning if starts_inside else any_of([with_reasoning, answer])


def after_analysis(answer: Tag) -> Tag:
    """Returns the format of an optional harmony message of analysis, then the answer.

    Args:
        answer: the answer with its header.
    """
    end = f"<|end|>{START}assistant"
    with_reasoning = sequence(tag(f"{CHANNEL}analysis{MESSAGE}", ANY_TEXT, end), answer)
    return any_of([with_reasoning, answer])


def structural_tag(content: Tag) -> Grammar:
    """Returns a format as a grammar."""
    whole = {"type": "structural_tag", "format": content}
    return Grammar.of(GrammarKind.STRUCTURAL_TAG, json.dumps(whole, ensure_ascii=False))


def _call(family: str, tool: Tool) -> Tag:
    call_family = tool_formats.FAMILIES[family]
    if family in TAGS:
        return _tagged_call(TAGS[family], tool, has_section=call_family.section is not None)
    if family == "pythonic":
        return tag(f"{tool.name}(", python_arguments(tool), ")")
    arguments = json_schema(tool.schema)
    if call_family.frame is not None:
        before, between, end = call_family.frame
        return tag(f"{before}{json.dumps(tool.name)[1:-1]}{between}", arguments, end)
    assert family == "kimi-k2"
    content = sequence(regex("[0-9]{1,4}"), text(tool_formats.KIMI_ARGS), arguments)
    return tag(
        f"{tool_formats.KIMI_CALL}functions.{tool.name}:", content, tool_formats.KIMI_CALL_END
    )


def _tagged_call(tags: Tags, tool: Tool, *, has_section: bool) -> Tag:
    """Returns the format of one call.

    Args:
        has_section: all calls share one section; else each call has its own.
    """
    # The line break belongs to the end: as a separator it would look like the start of other text.
    begin, end = ("", "\n") if has_section else (f"{tags.begin}\n", f"\n{tags.end}")
    arguments = tagged_arguments(tags, tool)
    if not tags.call_end:
        return tag(f"{tags.begin}{tool.name}", sequence(regex("\n?"), arguments), tags.end)
    head = f"{begin}{tags.before_name}{tool.name}{tags.after_name}\n"
    return tag(head, arguments, f"{tags.call_end}{end}")
