"""Calls with every argument between its own tags, strings without quotes.

Families differ only in the tags. They share one grammar:

    section = begin call* end
    call = before_name NAME after_name (key NAME after_key before_value VALUE value_end)* call_end
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from gateway.output.arguments import (
    ArgumentWriter,
    Schema,
    argument_json,
    property_schema,
    types_of,
)
from gateway.output.parser import Format, Parts, Reader, Steps, Waiting

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
