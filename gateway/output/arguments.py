"""Arguments of calls that do not come as one JSON object, and their types in the tool's schema.

Families that put every argument between tags of its own write strings as they are and all else as
JSON. The text `12` is then a string or a number by the schema alone."""

from __future__ import annotations

import ast
import json
import warnings
from collections.abc import Mapping
from typing import Any, NoReturn

from gateway.output.parser import Emit

Schema = Mapping[str, Any]

JSON_TYPES = frozenset({"string", "integer", "number", "boolean", "null", "object", "array"})
_MAX_REFERENCES = 16
_MAX_LITERAL_CHARACTERS = 1 << 16
_NO_LITERAL = (ValueError, SyntaxError, TypeError, MemoryError, RecursionError)


def property_schema(schema: Schema, name: str) -> Schema:
    """Returns the schema of an argument; an empty one where the tool's says nothing of it."""
    properties = schema.get("properties")
    found = properties.get(name) if isinstance(properties, Mapping) else None
    return resolved(found if isinstance(found, Mapping) else {}, schema)


def resolved(schema: Schema, root: Schema) -> Schema:
    """Returns a schema with a reference at its top, or an `allOf` of one, put in."""
    for _ in range(_MAX_REFERENCES):
        inner: Any = None
        if isinstance(schema.get("$ref"), str):
            inner = _target(schema["$ref"], root)
        elif isinstance(schema.get("allOf"), list) and len(schema["allOf"]) == 1:
            inner = schema["allOf"][0]
        if not isinstance(inner, Mapping):
            break
        own = {key: value for key, value in schema.items() if key not in ("$ref", "allOf")}
        schema = {**inner, **own}
    return schema


def own_types(schema: Schema) -> frozenset[str]:
    """Returns the JSON types that a schema allows, by itself."""
    given = schema.get("type")
    if isinstance(given, str | list):
        return frozenset([given] if isinstance(given, str) else map(str, given)) & JSON_TYPES
    if isinstance(schema.get("enum"), list) or "const" in schema:
        return frozenset(map(type_of, schema.get("enum") or [schema.get("const")]))
    return JSON_TYPES


def types_of(
    schema: Schema, root: Schema, known: dict[int, frozenset[str]] | None = None
) -> frozenset[str]:
    """Returns the JSON types that a schema and its alternatives allow.

    Args:
        known: what it has found, so that it looks at each part of `root` once.
    """
    known = {} if known is None else known
    if (part := id(schema)) in known:
        return known[part]
    known[part] = frozenset()  # where it refers to itself, nothing more
    schema = resolved(schema, root)
    found = own_types(schema)
    for key in ("anyOf", "oneOf"):
        branches = schema.get(key)
        if isinstance(branches, list):
            inner = [types_of(each, root, known) for each in branches if _is_schema(each)]
            found &= frozenset().union(*inner)
    known[part] = found | {"null"} if schema.get("nullable") is True else found
    return known[part]


def type_of(value: Any) -> str:
    """Returns the JSON type of a value; integers count as `integer`, not `number`."""
    if isinstance(value, bool):
        return "boolean"
    names = {str: "string", int: "integer", float: "number", type(None): "null", dict: "object"}
    return names.get(type(value), "array")


def argument_json(text: str, types: frozenset[str]) -> str:
    """Returns an argument as JSON.

    Text that is of none of the types stays what it says: JSON if it is, or else a string.

    Args:
        text: as the model wrote it.
        types: that the schema allows.
    """
    if types == {"string"}:
        return json.dumps(text, ensure_ascii=False)
    written = text.strip()
    try:
        value = json.loads(written, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return _literal_json(text, types)
    if "string" in types and (isinstance(value, str) or not _is_of(value, types)):
        return json.dumps(text, ensure_ascii=False)
    return written


def literal_value(text: str) -> Any:
    """Returns the value of JSON or of a Python literal, in which JSON's names may stand as well.

    Raises:
        ValueError: it is neither.
    """
    try:
        return json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        pass
    if len(text) > _MAX_LITERAL_CHARACTERS:
        message = f"a literal has {len(text)} characters; at most {_MAX_LITERAL_CHARACTERS} fit"
        raise ValueError(message)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of escapes that Python does not know
            tree = ast.parse(text.strip(), mode="eval")
        value = ast.literal_eval(_JsonNames().visit(tree))
        json.dumps(value, allow_nan=False)
    except _NO_LITERAL as error:
        raise ValueError(f"{text[:64]!r} is no literal") from error
    return value


class _JsonNames(ast.NodeTransformer):
    """Reads `true`, `false` and `null` as Python's constants."""

    _values: Mapping[str, bool | None] = {"true": True, "false": False, "null": None}

    def visit_Name(self, node: ast.Name) -> ast.expr:
        if node.id not in self._values:
            return node
        return ast.copy_location(ast.Constant(self._values[node.id]), node)


def _literal_json(text: str, types: frozenset[str]) -> str:
    """Returns text that is not JSON: Python's `True` or `{'a': 1}` where no string can be meant."""
    if "string" not in types:
        try:
            return json.dumps(literal_value(text), ensure_ascii=False)
        except ValueError:
            pass
    return json.dumps(text, ensure_ascii=False)


def _is_of(value: Any, types: frozenset[str]) -> bool:
    name = type_of(value)
    return name in types or (name == "integer" and "number" in types)


def _is_schema(value: Any) -> bool:
    return isinstance(value, Mapping)


def _target(reference: str, root: Schema) -> Any:
    """Returns what a reference within the schema points at; None where there is nothing."""
    found: Any = root
    for part in reference.removeprefix("#").split("/")[1:]:
        part = part.replace("~1", "/").replace("~0", "~")
        if not isinstance(found, Mapping) or part not in found:
            return None
        found = found[part]
    return found if reference.startswith("#") else None


def _refuse(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


class ArgumentWriter:
    """Writes one object, key by key. One that `end` never closed was cut off or garbled."""

    def __init__(self, emit: Emit) -> None:
        self._emit = emit
        self._has_keys = False

    def key(self, name: str) -> None:
        """Writes a key; its value comes next."""
        lead = ", " if self._has_keys else "{"
        self._has_keys = True
        self._emit(f"{lead}{json.dumps(name, ensure_ascii=False)}: ")

    def value(self, written: str) -> None:
        """Writes JSON, or a piece of it."""
        self._emit(written)

    def text(self, piece: str) -> None:
        """Writes a piece of a string, between quotes that the caller writes."""
        self._emit(json.dumps(piece, ensure_ascii=False)[1:-1])

    def end(self) -> None:
        self._emit("}" if self._has_keys else "{}")
