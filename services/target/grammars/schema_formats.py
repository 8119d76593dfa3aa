"""Formats of strings in JSON schemas. The standard lets an implementation ignore those it does not
know; llguidance refuses them."""

from __future__ import annotations

from shared.json_schema import JsonSchema, edited

KNOWN_FORMATS = frozenset(
    {"date", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "time"}
    | {"unknown", "uri", "uuid"}
)


def without_unknown_formats(schema: JsonSchema) -> JsonSchema:
    """Returns the schema without the formats nobody here knows. What only looks like a format, a
    property of that name or a value of an `enum`, stays."""
    return edited(schema, _drop_unknown_format)


def _drop_unknown_format(schema: JsonSchema) -> None:
    given = schema.get("format")
    if isinstance(given, str) and given not in KNOWN_FORMATS:
        del schema["format"]
