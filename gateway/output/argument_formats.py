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
        while (seen := (yield from reader.copy_until(beginnings, parts.content))) is not None:
            while (yield from _Call(reader, parts, tags, schemas, seen).read()):
                if not tags.call_end:
                    break
                seen = yield from reader.take_space()
                if (yield from reader.take(tags.end)):
                    break

    return read


class _Call:
    """Reads one call.

    Args:
        seen: the marker read before the call; it is content if this turns out to be no call.
    """

    def __init__(
        self, reader: Reader, parts: Parts, tags: Tags, schemas: Mapping[str, Schema], seen: str
    ) -> None:
        self._reader = reader
        self._parts = parts
        self._tags = tags
        self._schemas = schemas
        self._seen = seen
        self._schema: Schema = {}
        self._writer: ArgumentWriter | None = None

    def read(self) -> Waiting[bool]:
        """Returns whether the call is complete; if not, the text read so far becomes content."""
        is_whole = yield from self._call()
        if not is_whole:
            self._parts.content(self._seen)
        return is_whole

    def _call(self) -> Waiting[bool]:
        tags = self._tags
        is_bare = bool(tags.before_name) and self._seen == tags.before_name
        if not is_bare:
            yield from self._space()
            if not (yield from self._take(tags.before_name)):
                return False
        name = yield from self._reader.take_to(_AFTER_NAME)
        self._seen += name
        if not name or (is_bare and name not in self._schemas):
            return False
        if not (yield from self._take(tags.after_name)):
            return False
        while True:
            yield from self._space()
            if (yield from self._take(tags.key)):
                if not (yield from self._argument(name)):
                    return False
            elif (yield from self._take(tags.call_end or tags.end)):
                self._begin(name).end()
                return True
            else:
                return False

    def _argument(self, name: str) -> Waiting[bool]:
        tags = self._tags
        key, marker = yield from self._reader.take_until((tags.after_key,))
        self._seen += key + (marker or "")
        if marker is None:
            return False
        if tags.before_value:
            yield from self._space()
            if not (yield from self._take(tags.before_value)):
                return False
        writer = self._begin(name)
        writer.key(key)
        self._seen = ""
        return (yield from self._value(writer, key))

    def _value(self, writer: ArgumentWriter, key: str) -> Waiting[bool]:
        """Writes a value: a string as it arrives, any other value when it is complete."""
        end = self._tags.value_end
        ends: tuple[str, ...] = (end,)
        if self._tags.is_padded:
            ends = (f"\n{end}", end)
            yield from self._reader.take("\n")
        types = types_of(property_schema(self._schema, key), self._schema)
        if types == {"string"}:
            writer.value('"')
            if (yield from self._reader.copy_until(ends, writer.text)) is None:
                return False
            writer.value('"')
            return True
        text, marker = yield from self._reader.take_until(ends)
        writer.value(text if marker is None else argument_json(text, types))
        return marker is not None

    def _begin(self, name: str) -> ArgumentWriter:
        if self._writer is None:
            self._schema = self._schemas.get(name, {})
            self._writer = ArgumentWriter(self._parts.begin_call(name))
        return self._writer

    def _space(self) -> Waiting[None]:
        self._seen += yield from self._reader.take_space()

    def _take(self, text: str) -> Waiting[bool]:
        if not (yield from self._reader.take(text)):
            return False
        self._seen += text
        return True


def pythonic(names: Collection[str]) -> Format:
    """Returns the format.

    Values are literals; nothing is evaluated. A list of anything but tool calls is an answer. A
    call begins with its first argument. Malformed text after that leaves the arguments unclosed and
    becomes content.

    Args:
        names: names of the tools.
    """

    def read(reader: Reader, parts: Parts) -> Steps:
        seen = yield from reader.take_space()
        for mark in (PYTHON_START, PYTHON_TAG):
            if (yield from reader.take(mark)):
                seen = yield from reader.take_space()
        if (yield from reader.take("[")):
            yield from _calls(reader, parts, names, f"{seen}[")
        else:
            parts.content(seen)
        yield from reader.copy_until((), parts.content)

    return read


def _calls(reader: Reader, parts: Parts, names: Collection[str], seen: str) -> Waiting[None]:
    while True:
        seen += yield from reader.take_space()
        no_call = yield from _call(reader, parts, names, seen)
        if no_call is not None:
            parts.content(no_call)
            return
        seen = yield from reader.take_space()
        if not (yield from reader.take(",")):
            break
        seen += ","
    if not (yield from reader.take("]")):
        parts.content(seen)
        return
    seen = yield from reader.take_space()
    if not (yield from reader.take(PYTHON_END)):
        parts.content(seen)


def _call(reader: Reader, parts: Parts, names: Collection[str], seen: str) -> Waiting[str | None]:
    """Returns None for a complete call, else the text that turned out to be no call.

    Args:
        seen: the text before the call, which then is no call either.
    """
    name = yield from reader.take_to(_AFTER_NAME)
    seen += name
    if name not in names or not (yield from reader.take("(")):
        return seen
    writer: ArgumentWriter | None = None
    seen += "("
    while True:
        seen += yield from reader.take_space()
        if (yield from reader.take(")")):
            (writer or ArgumentWriter(parts.begin_call(name))).end()
            return None
        key = yield from reader.take_to(_AFTER_NAME)
        seen += key + (yield from reader.take_space())
        if not key or not (yield from reader.take("=")):
            return seen
        written = yield from _literal(reader)
        try:
            value = json.dumps(literal_value(written), ensure_ascii=False)
        except ValueError:
            return f"{seen}={written}"
        if (yield from reader.peek()) not in (",", ")"):
            return f"{seen}={written}"
        writer = writer or ArgumentWriter(parts.begin_call(name))
        writer.key(key)
        writer.value(value)
        seen = "," if (yield from reader.take(",")) else ""


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
