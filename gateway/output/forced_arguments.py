"""Grammars of arguments that a model does not write as one JSON object.

They come in the order of the schema, each at most once and no others. That is narrower than most
schemas, never wider.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from gateway.output.argument_types import Schema, property_schema, resolved, types_of
from gateway.output.structure import (
    ANY_TEXT,
    Tag,
    any_of,
    json_schema,
    optional,
    regex,
    sequence,
    tag,
    text,
)
from gateway.output.tagged_calls import Tags
from gateway.output.tools import Tool
from shared.errors import InvalidArgument

_DEFINITIONS = ("$defs", "definitions")
_AT_ROOT = frozenset(
    {
        *("allOf", "anyOf", "oneOf", "not", "if", "$ref", "patternProperties", "minProperties"),
        *("maxProperties", "dependentRequired", "dependentSchemas", "propertyNames"),
    }
)
_LINE_BREAK = regex("\\n?")


def tagged_arguments(tags: Tags, tool: Tool) -> Tag:
    """Returns the arguments of a call, each between its tags and a line break after it.

    Raises:
        InvalidArgument: the schema cannot be held to in this way.
    """
    parts: list[Tag] = []
    for name, is_required in _properties(tool):
        key = f"{tags.key}{name}{tags.after_key}"
        if tags.before_value:
            value = _held(tool, name, tags.before_value, tags.value_end)
            argument = sequence(text(key), _LINE_BREAK, value, _LINE_BREAK)
        else:
            pad = "\n" if tags.is_padded else ""
            value = _held(tool, name, key + pad, tags.value_end, pad)
            argument = sequence(value, text("\n"))
        parts.append(argument if is_required else optional(argument))
    return sequence(*parts)


def python_arguments(tool: Tool) -> Tag:
    """Returns `key=value, …`, those that must come first.

    Raises:
        InvalidArgument: the schema cannot be held to in this way.
    """
    properties = sorted(_properties(tool), key=lambda each: not each[1])
    pairs = [sequence(text(f"{name}="), _literal(tool, name)) for name, _ in properties]
    num_required = sum(is_required for _, is_required in properties)
    if num_required:
        return sequence(*_listed(pairs[:num_required]), *_more(pairs[num_required:]))
    starts = [sequence(pair, *_more(pairs[i + 1 :])) for i, pair in enumerate(pairs)]
    return optional(any_of(starts)) if starts else text("")


def _listed(pairs: list[Tag]) -> Iterator[Tag]:
    for index, pair in enumerate(pairs):
        yield sequence(text(", "), pair) if index else pair


def _more(pairs: list[Tag]) -> Iterator[Tag]:
    for pair in pairs:
        yield optional(sequence(text(", "), pair))


def _properties(tool: Tool) -> list[tuple[str, bool]]:
    """Returns the arguments and whether each must be there.

    Raises:
        InvalidArgument: the schema says more than which arguments there are.
    """
    found = sorted(_AT_ROOT & tool.schema.keys())
    if found:
        raise _refused(tool, f"has {found[0]!r} beside its properties")
    properties = tool.schema.get("properties") or {}
    required = tool.schema.get("required") or []
    names = [*properties, *(name for name in required if name not in properties)]
    return [(name, name in required) for name in names]


def _held(tool: Tool, name: str, begin: str, end: str, pad: str = "") -> Tag:
    """Returns a value between its tags: strings are bare text.

    Args:
        pad: before the end; free text may end with it or not.

    Raises:
        InvalidArgument: it cannot be held to in this way.
    """
    schema = property_schema(tool.schema, name)
    branches = list(_branches(tool, name, schema, tool.schema, set()))
    if not branches:
        raise _refused(tool, f"allows no value of {name!r}")
    if ANY_TEXT in branches:
        return tag(begin, ANY_TEXT, end)
    if len(branches) > 1:
        return tag(begin, any_of(branches), pad + end)
    if branches == [_at_least(schema)]:
        # After the characters that must be there, what follows may be any text.
        return sequence(text(begin), regex(_characters(schema)), tag("", ANY_TEXT, end))
    return tag(begin, branches[0], pad + end)


def _branches(tool: Tool, name: str, schema: Schema, root: Schema, seen: set[int]) -> Iterator[Tag]:
    """Yields the ways in which a value may be written. Free text is all of the others too.

    Args:
        seen: alternatives that add nothing when they come again.
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
    others = sorted(types - {"string"} - ({"integer"} if "number" in types else set()))
    if others:
        yield json_schema(_with_definitions({**schema, "type": others}, root))


def _bare_text(tool: Tool, name: str, schema: Schema) -> Tag:
    """Returns the text of a string. `format` is an annotation and holds nothing."""
    for keyword in ("pattern", "allOf", "not", "if"):
        if keyword in schema:
            raise _refused(tool, f"has {keyword!r} for {name!r}")
    if "maxLength" in schema:
        # Text of a bounded length must not be able to run into the tag that ends it.
        return regex(f"[^<]{{{schema.get('minLength', 0)},{schema['maxLength']}}}")
    return _at_least(schema) if schema.get("minLength") else ANY_TEXT


def _at_least(schema: Schema) -> Tag:
    return regex(f"{_characters(schema)}[^<]*")


def _characters(schema: Schema) -> str:
    """Returns the characters that must be there; the last is not the line break before the end."""
    return f"(.|\\n){{{schema.get('minLength', 1) - 1}}}[^\\n]"


def _literal(tool: Tool, name: str) -> Tag:
    """Returns a value as a Python literal; JSON is one to the parser, with JSON's names."""
    schema = property_schema(tool.schema, name)
    values = schema.get("enum") or ([schema["const"]] if "const" in schema else [])
    if values:
        return any_of([text(_python(value)) for value in values])
    if types_of(schema, tool.schema) == {"boolean"}:
        return any_of([text("True"), text("False")])
    return json_schema(_with_definitions(schema, tool.schema))


def _python(value: Any) -> str:
    """Returns a value of an enum as Python writes it, strings in double quotes."""
    return json.dumps(value, ensure_ascii=False) if isinstance(value, str) else repr(value)


def _with_definitions(schema: Schema, root: Schema) -> Mapping[str, Any]:
    return {**{key: root[key] for key in _DEFINITIONS if key in root}, **schema}


def _refused(tool: Tool, what: str) -> InvalidArgument:
    message = (
        f"the schema of the tool {tool.name!r} {what}; calls of this model write each argument by "
        "itself and cannot be held to that: leave tool_choice auto and strict off"
    )
    return InvalidArgument.of("TOOL_SCHEMA_UNSUPPORTED", "tools", message)
