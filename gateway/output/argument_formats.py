"""Calls whose arguments are not one JSON object: each between its own tags, or written as Python.

Families that write every argument between tags write strings without quotes and all other values as
JSON. Only the tool's schema tells whether the text `12` is a string or a number. The families
differ only in the tags and share one grammar:

    section = begin call* end
    call = before_name NAME after_name (key NAME after_key before_value VALUE value_end)* call_end

Calls as Python, `[name(key=value, …), …]` and nothing else, are those of Llama 4 and Llama 3.2."""

from __future__ import annotations

import ast
import json
import re
import warnings
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any, NoReturn

from gateway.output.parser import Emit, Format, Parts, Reader, Steps, Waiting

Schema = Mapping[str, Any]

JSON_TYPES = frozenset({"string", "integer", "number", "boolean", "null", "object", "array"})
_MAX_REFERENCES = 16
_MAX_LITERAL_CHARACTERS = 1 << 16
_NO_LITERAL = (ValueError, SyntaxError, TypeError, MemoryError, RecursionError)
PYTHON_TAG = "<|python_tag|>"
PYTHON_START, PYTHON_END = "<|python_start|>", "<|python_end|>"
_STRUCTURE = re.compile(r"""["'()\[\]{},]""")
_IN_STRING = {'"': re.compile(r'["\\]'), "'": re.compile(r"['\\]")}


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
        value = json.loads(written, parse_constant=refuse_constant)
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
        return json.loads(text, parse_constant=refuse_constant)
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


def refuse_constant(name: str) -> NoReturn:
    """Raises: ValueError, because Python reads `NaN` and infinities, which are not JSON."""
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


_AFTER_NAME = re.compile(r"[^\w.-]")


@dataclass(frozen=True, slots=True)
class Tags:
    """The tags of a family.

    Attributes:
        call_end: empty where a section holds one call and ends with it.
        before_value: tag before a value, after the key and white space; may be empty.
        is_padded: a line break after the opening and before the closing tag of a value is layout.
    """

    begin: str
    end: str
    before_name: str
    after_name: str
    call_end: str
    key: str
    after_key: str
    before_value: str
    value_end: str
    is_padded: bool = False

    @property
    def marks(self) -> tuple[str, ...]:
        """The tags that may be special tokens."""
        tags = (self.begin, self.end, self.key, self.after_key, self.before_value, self.value_end)
        return tuple(tag for tag in tags if tag.startswith("<") and tag.endswith(">"))


QWEN3_CODER = Tags(
    *("<tool_call>", "</tool_call>"),
    *("<function=", ">", "</function>"),
    *("<parameter=", ">", "", "</parameter>"),
    is_padded=True,
)
SEED_OSS = replace(QWEN3_CODER, begin="<seed:tool_call>", end="</seed:tool_call>", is_padded=False)
GLM = Tags(
    *("<tool_call>", "</tool_call>"),
    *("", "", ""),
    *("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
)
MINIMAX = Tags(
    *("<minimax:tool_call>", "</minimax:tool_call>"),
    *('<invoke name="', '">', "</invoke>"),
    *('<parameter name="', '">', "", "</parameter>"),
)
TAGS: Mapping[str, Tags] = {
    "qwen3-coder": QWEN3_CODER,
    "seed-oss": SEED_OSS,
    "glm45": GLM,
    "minimax-m2": MINIMAX,
}


def tagged(tags: Tags, schemas: Mapping[str, Schema]) -> Format:
    """Returns the format of a family.

    A call begins when its name and the tag after it have arrived; malformed text before that is
    content. Malformed text after that leaves the arguments unclosed and is content again.

    Args:
        schemas: schemas of the tools' arguments, by name; they tell which values are strings.
    """

    # Models forget the first tag; then the name of a known tool marks a call.
    beginnings = (tags.begin, tags.before_name) if tags.before_name else (tags.begin,)

    def read(reader: Reader, parts: Parts) -> Steps:
        while (before := (yield from reader.copy_until(beginnings, parts.content))) is not None:
            while True:
                reader.mark(before)
                is_whole = yield from _tagged_call(reader, parts, tags, schemas, before)
                seen = reader.seen()
                if not is_whole:
                    parts.content(seen)
                if not is_whole or not tags.call_end:
                    break
                before = yield from reader.take_space()
                if (yield from reader.take(tags.end)):
                    break

    return read


def _tagged_call(
    reader: Reader, parts: Parts, tags: Tags, schemas: Mapping[str, Schema], before: str
) -> Waiting[bool]:
    """Reads one call; returns whether it is complete. If not, what the reader has seen is content.

    Args:
        before: the marker read before the call.
    """
    is_bare = bool(tags.before_name) and before == tags.before_name
    if not is_bare:
        yield from reader.take_space()
        if not (yield from reader.take(tags.before_name)):
            return False
    name = yield from reader.take_to(_AFTER_NAME)
    if not name or (is_bare and name not in schemas):
        return False
    if not (yield from reader.take(tags.after_name)):
        return False
    schema, writer = schemas.get(name, {}), None
    while True:
        yield from reader.take_space()
        if not (yield from reader.take(tags.key)):
            if not (yield from reader.take(tags.call_end or tags.end)):
                return False
            (writer or ArgumentWriter(parts.begin_call(name))).end()
            return True
        key, marker = yield from reader.take_until((tags.after_key,))
        if marker is None:
            return False
        if tags.before_value:
            yield from reader.take_space()
            if not (yield from reader.take(tags.before_value)):
                return False
        writer = writer or ArgumentWriter(parts.begin_call(name))
        writer.key(key)
        is_whole = yield from _tagged_value(
            reader, tags, writer, property_schema(schema, key), schema
        )
        reader.mark()
        if not is_whole:
            return False


def _tagged_value(
    reader: Reader, tags: Tags, writer: ArgumentWriter, schema: Schema, root: Schema
) -> Waiting[bool]:
    """Writes a value: a string as it arrives, any other value when it is complete."""
    ends: tuple[str, ...] = (tags.value_end,)
    if tags.is_padded:
        ends = (f"\n{tags.value_end}", tags.value_end)
        yield from reader.take("\n")
    types = types_of(schema, root)
    if types == {"string"}:
        writer.value('"')
        if (yield from reader.copy_until(ends, writer.text)) is None:
            return False
        writer.value('"')
        return True
    text, marker = yield from reader.take_until(ends)
    writer.value(text if marker is None else argument_json(text, types))
    return marker is not None


def pythonic(names: Collection[str]) -> Format:
    """Returns the format.

    Values are literals; nothing is evaluated. A list of anything but tool calls is an answer. A
    call begins with its first argument. Malformed text after that leaves the arguments unclosed and
    becomes content.

    Args:
        names: names of the tools.
    """

    def read(reader: Reader, parts: Parts) -> Steps:
        reader.mark()
        yield from reader.take_space()
        for mark in (PYTHON_START, PYTHON_TAG):
            if (yield from reader.take(mark)):
                reader.mark()
                yield from reader.take_space()
        is_list = (yield from reader.take("[")) and (yield from _calls(reader, parts, names))
        seen = reader.seen()
        if not is_list:
            parts.content(seen)
        yield from reader.copy_until((), parts.content)

    return read


def _calls(reader: Reader, parts: Parts, names: Collection[str]) -> Waiting[bool]:
    """Reads calls to the end of the list; returns whether it is complete. If not, what the reader
    has seen is content."""
    while True:
        yield from reader.take_space()
        if not (yield from _call(reader, parts, names)):
            return False
        reader.mark()
        yield from reader.take_space()
        if not (yield from reader.take(",")):
            break
    if not (yield from reader.take("]")):
        return False
    reader.mark()
    yield from reader.take_space()
    return (yield from reader.take(PYTHON_END))


def _call(reader: Reader, parts: Parts, names: Collection[str]) -> Waiting[bool]:
    """Reads one call; returns whether it is complete."""
    name = yield from reader.take_to(_AFTER_NAME)
    if name not in names or not (yield from reader.take("(")):
        return False
    writer: ArgumentWriter | None = None
    while True:
        yield from reader.take_space()
        if (yield from reader.take(")")):
            (writer or ArgumentWriter(parts.begin_call(name))).end()
            return True
        key = yield from reader.take_to(_AFTER_NAME)
        yield from reader.take_space()
        if not key or not (yield from reader.take("=")):
            return False
        written = yield from _literal(reader)
        try:
            value = json.dumps(literal_value(written), ensure_ascii=False)
        except ValueError:
            return False
        if (yield from reader.peek()) not in (",", ")"):
            return False
        writer = writer or ArgumentWriter(parts.begin_call(name))
        writer.key(key)
        writer.value(value)
        reader.mark()
        yield from reader.take(",")


def _literal(reader: Reader) -> Waiting[str]:
    """Returns the text up to the comma or bracket that ends a value."""
    text, depth = "", 0
    while True:
        text += yield from reader.take_to(_STRUCTURE)
        character = yield from reader.peek()
        if not character or (depth == 0 and character in ",)]}"):
            return text
        yield from reader.take(character)
        text += character
        if character in _IN_STRING:
            text += yield from _string(reader, character)
        elif character in "([{":
            depth += 1
        elif character in ")]}":
            depth -= 1


def _string(reader: Reader, quote: str) -> Waiting[str]:
    """Returns the rest of a string, after its opening quote."""
    text = ""
    while True:
        text += yield from reader.take_to(_IN_STRING[quote])
        character = yield from reader.peek()
        yield from reader.take(character)
        text += character
        if character in (quote, ""):
            return text
        escaped = yield from reader.peek()
        yield from reader.take(escaped)
        text += escaped
