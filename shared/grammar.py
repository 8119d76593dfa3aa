"""Constraints on an output, as clients write them. Compiled on the target, never on the gateway."""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

JsonSchema = dict[str, Any]
_OF_SCHEMAS = frozenset(
    {"$defs", "definitions", "dependentSchemas", "patternProperties", "properties"}
)
_SCHEMAS = frozenset(
    {"additionalItems", "additionalProperties", "contains", "else", "if", "items", "not"}
    | {"propertyNames", "then", "unevaluatedItems", "unevaluatedProperties"}
    | {"allOf", "anyOf", "oneOf", "prefixItems"}
)


class GrammarKind(enum.Enum):
    """The languages grammars come in."""

    JSON_SCHEMA = "JSON schema"
    REGEX = "regular expression"
    EBNF = "grammar"
    CHOICES = "choice"
    STRUCTURAL_TAG = "structural tag"


@dataclass(frozen=True, slots=True)
class Grammar:
    """A grammar over the whole output.

    Attributes:
        source: one text; for choices, each of the texts.
    """

    kind: GrammarKind
    source: tuple[str, ...]

    def __post_init__(self) -> None:
        assert len(self.source) == 1 or self.kind is GrammarKind.CHOICES

    @classmethod
    def of(cls, kind: GrammarKind, source: str) -> Grammar:
        """Returns the grammar of one text."""
        return cls(kind, (source,))

    @property
    def text(self) -> str:
        """The one text of every kind but choices."""
        return self.source[0]

    @property
    def size_bytes(self) -> int:
        return sum(len(text.encode()) for text in self.source)


def edited(schema: JsonSchema, edit: Callable[[JsonSchema], None]) -> JsonSchema:
    """Returns a copy of a schema in which every schema has been through `edit`, those above first.
    What only looks like a schema, a value of an `enum`, stays."""
    copy = dict(schema)
    waiting = [copy]
    while waiting:
        current = waiting.pop()
        edit(current)
        for key, value in list(current.items()):
            if key in _OF_SCHEMAS and isinstance(value, dict):
                current[key], inner = _copied(value)
                waiting += inner
            elif key in _SCHEMAS:
                holder, inner = _copied({key: value})
                current[key] = holder[key]
                waiting += inner
    return copy


def _copied(holder: JsonSchema) -> tuple[JsonSchema, list[JsonSchema]]:
    """Returns a copy of a keyword's value that holds schemas, alone or in lists, and the copied
    schemas."""
    copy = {key: _copy(value) for key, value in holder.items()}
    return copy, [schema for value in copy.values() for schema in _schemas(value)]


def _copy(value: Any) -> Any:
    if isinstance(value, list):
        return [dict(each) if isinstance(each, dict) else each for each in value]
    return dict(value) if isinstance(value, dict) else value


def _schemas(value: Any) -> Iterator[JsonSchema]:
    yield from (each for each in (value if isinstance(value, list) else [value])
                if isinstance(each, dict))  # fmt: skip
