"""Formats of strings in JSON schemas. The standard lets an implementation ignore those it does not
know; llguidance refuses them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

KNOWN_FORMATS = frozenset(
    {"date", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "time"}
    | {"unknown", "uri", "uuid"}
)
_OF_SCHEMAS = frozenset(
    {"$defs", "definitions", "dependentSchemas", "patternProperties", "properties"}
)
_SCHEMAS = frozenset(
    {"additionalItems", "additionalProperties", "contains", "else", "if", "items", "not"}
    | {"propertyNames", "then", "unevaluatedItems", "unevaluatedProperties"}
    | {"allOf", "anyOf", "oneOf", "prefixItems"}
)


def without_unknown_formats(schema: dict[str, Any]) -> dict[str, Any]:
    """Returns the schema without the formats nobody here knows. What only looks like a format, a
    property of that name or a value of an `enum`, stays."""
    copy = dict(schema)
    waiting = [copy]
    while waiting:
        current = waiting.pop()
        given = current.get("format")
        if isinstance(given, str) and given not in KNOWN_FORMATS:
            del current["format"]
        for key, value in list(current.items()):
            if key in _OF_SCHEMAS and isinstance(value, dict):
                current[key], inner = _copied(value)
                waiting += inner
            elif key in _SCHEMAS:
                holder, inner = _copied({key: value})
                current[key] = holder[key]
                waiting += inner
    return copy


def _copied(holder: dict[str, Any]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Returns a copy of a keyword's value that holds schemas, alone or in lists, and the copied
    schemas."""
    copy = {key: _copy(value) for key, value in holder.items()}
    return copy, [schema for value in copy.values() for schema in _schemas(value)]


def _copy(value: Any) -> Any:
    if isinstance(value, list):
        return [dict(each) if isinstance(each, dict) else each for each in value]
    return dict(value) if isinstance(value, dict) else value


def _schemas(value: Any) -> Iterator[dict[str, Any]]:
    yield from (each for each in (value if isinstance(value, list) else [value])
                if isinstance(each, dict))  # fmt: skip
