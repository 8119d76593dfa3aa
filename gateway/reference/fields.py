"""Types of a JSON schema in words."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_PREFIX = "#/components/schemas/"


@dataclass(frozen=True, slots=True)
class Type:
    """A type in words; `schema` is the one it names, if any."""

    text: str
    schema: str | None = None


@dataclass(frozen=True, slots=True)
class SchemaField:
    """A property of an object."""

    name: str
    types: tuple[Type, ...]
    is_required: bool
    description: str


def fields(schema: Mapping[str, Any]) -> tuple[SchemaField, ...]:
    """Returns the properties of an object in their order."""
    required = schema.get("required", ())
    return tuple(
        SchemaField(name, types(each), name in required, each.get("description", ""))
        for name, each in schema.get("properties", {}).items()
    )


def types(schema: Mapping[str, Any]) -> tuple[Type, ...]:
    """Returns what a value may be, each alternative once. Null, which means absent, is left out."""
    alternatives = schema.get("anyOf") or schema.get("oneOf")
    if alternatives:
        found = [each for one in alternatives for each in types(one)]
    else:
        found = [_type(schema)]
    return tuple(dict.fromkeys(each for each in found if each.text != "null"))


def _type(schema: Mapping[str, Any]) -> Type:
    if "$ref" in schema:
        name = str(schema["$ref"]).removeprefix(_PREFIX)
        return Type(name, name)
    if "const" in schema:
        return Type(repr(schema["const"]))
    if "enum" in schema:
        return Type(" | ".join(map(repr, schema["enum"])))
    if schema.get("type") == "array":
        items = types(schema.get("items", {}))
        text = " or ".join(each.text for each in items)
        return Type(f"list of {text}", next((each.schema for each in items if each.schema), None))
    return Type(str(schema.get("type", "any")))
