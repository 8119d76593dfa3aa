"""Call arguments that are not written as one JSON object, and their types in the tool's schema.

Model families that write every argument between tags write strings without quotes and all other
values as JSON. Only the schema tells whether the text `12` is a string or a number."""

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
    """Returns the schema of an argument; an empty one where the tool's schema has none."""
    properties = schema.get("properties")
    argument = properties.get(name) if isinstance(properties, Mapping) else None
    return resolved(argument if isinstance(argument, Mapping) else {}, schema)


def resolved(schema: Schema, root: Schema) -> Schema:
    """Returns a schema with a `$ref` at its top, or an `allOf` of one schema, replaced."""
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
    """Returns the JSON types that a schema allows, without its alternatives."""
    given = schema.get("type")
    if isinstance(given, str | list):
        return frozenset([given] if isinstance(given, str) else map(str, given)) & JSON_TYPES
    if isinstance(schema.get("enum"), list) or "const" in schema:
        return frozenset(map(type_of, schema.get("enum") or [schema.get("const")]))
    return JSON_TYPES


def types_of(
    schema: Schema, root: Schema, memo: dict[int, frozenset[str]] | None = None
) -> frozenset[str]:
    """Returns the JSON types that a schema and its alternatives allow.

    Args:
        memo: results by `id` of the schema, so that each part of `root` is visited once.
    """
    memo = {} if memo is None else memo
    if (part := id(schema)) in memo:
        return memo[part]
    memo[part] = frozenset()  # a reference of a schema to itself adds no type
    schema = resolved(schema, root)
    types = own_types(schema)
    for key in ("anyOf", "oneOf"):
        branches = schema.get(key)
        if isinstance(branches, list):
            schemas = (branch for branch in branches if isinstance(branch, Mapping))
            types &= frozenset().union(*[types_of(branch, root, memo) for branch in schemas])
    memo[part] = types | {"null"} if schema.get("nullable") is True else types
    return memo[part]


def type_of(value: Any) -> str:
    """Returns the JSON type of a value; integers count as `integer`, not `number`."""
    if isinstance(value, bool):
        return "boolean"
    names = {str: "string", int: "integer", float: "number", type(None): "null", dict: "object"}
    return names.get(type(value), "array")


def argument_json(text: str, types: frozenset[str]) -> str:
    """Returns an argument as JSON.

    Text of none of the types is kept as it is: as JSON if it is JSON, else as a string.

    Args:
        text: the argument as the model wrote it.
        types: JSON types that the schema allows.
    """
    if types == {"string"}:
        return json.dumps(text, ensure_ascii=False)
    written = text.strip()
    try:
        value = json.loads(written, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return _literal_json(text, types)
    if "string" in types and (isinstance(value, str) or not _has_type(value, types)):
        return json.dumps(text, ensure_ascii=False)
    return written


def literal_value(text: str) -> Any:
    """Returns the value of JSON or of a Python literal, which may hold `true`, `false` and `null`.

    Raises:
        ValueError: the text is neither.
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
            warnings.simplefilter("ignore")  # warnings of invalid escapes
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
    """Returns text that is not JSON as JSON: a Python literal such as `True` or `{'a': 1}` if the
    schema allows no string, else a string."""
    if "string" not in types:
        try:
            return json.dumps(literal_value(text), ensure_ascii=False)
        except ValueError:
            pass
    return json.dumps(text, ensure_ascii=False)


def _has_type(value: Any, types: frozenset[str]) -> bool:
    name = type_of(value)
    return name in types or (name == "integer" and "number" in types)


def _target(reference: str, root: Schema) -> Any:
    """Returns the target of a reference within the schema; None where it does not exist."""
    value: Any = root
    for part in reference.removeprefix("#").split("/")[1:]:
        part = part.replace("~1", "/").replace("~0", "~")
        if not isinstance(value, Mapping) or part not in value:
            return None
        value = value[part]
    return value if reference.startswith("#") else None


def _refuse(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


class ArgumentWriter:
    """Writes one JSON object, key by key. Without `end` the object stays open: the model's output
    was cut off or malformed."""

    def __init__(self, emit: Emit) -> None:
        self._emit = emit
        self._has_keys = False

    def key(self, name: str) -> None:
        """Writes a key; the caller writes its value next."""
        lead = ", " if self._has_keys else "{"
        self._has_keys = True
        self._emit(f"{lead}{json.dumps(name, ensure_ascii=False)}: ")

    def value(self, written: str) -> None:
        """Writes a JSON value, or a piece of one."""
        self._emit(written)

    def text(self, piece: str) -> None:
        """Writes a piece of a string; the caller writes the quotes."""
        self._emit(json.dumps(piece, ensure_ascii=False)[1:-1])

    def end(self) -> None:
        self._emit("}" if self._has_keys else "{}")
