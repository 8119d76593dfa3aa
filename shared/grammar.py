"""Grammars that constrain an output, as text. The target compiles them, never the gateway."""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

JsonSchema = dict[str, Any]
_SCHEMA_MAPS = frozenset(
    {"$defs", "definitions", "dependentSchemas", "patternProperties", "properties"}
)
_SCHEMA_KEYWORDS = frozenset(
    {"additionalItems", "additionalProperties", "contains", "else", "if", "items", "not"}
    | {"propertyNames", "then", "unevaluatedItems", "unevaluatedProperties"}
    | {"allOf", "anyOf", "oneOf", "prefixItems"}
)


class GrammarKind(enum.Enum):
    """The language of a grammar."""

    JSON_SCHEMA = "JSON schema"
    REGEX = "regular expression"
    EBNF = "grammar"
    CHOICES = "choice"
    STRUCTURAL_TAG = "structural tag"


@dataclass(frozen=True, slots=True)
class Grammar:
    """A grammar over the whole output.

    Attributes:
        source: a single text; for choices, one text per choice.
    """

    kind: GrammarKind
    source: tuple[str, ...]

    def __post_init__(self) -> None:
        assert len(self.source) == 1 or self.kind is GrammarKind.CHOICES

    @classmethod
    def of(cls, kind: GrammarKind, source: str) -> Grammar:
        return cls(kind, (source,))

    @property
    def text(self) -> str:
        """The text of a grammar of any kind but choices."""
        return self.source[0]

    @property
    def size_bytes(self) -> int:
        return sum(len(text.encode()) for text in self.source)


def edited(schema: JsonSchema, edit: Callable[[JsonSchema], None]) -> JsonSchema:
    """Returns a copy of a schema with `edit` applied to it and every schema inside, outer ones
    first. Values that only look like schemas, such as those of an `enum`, stay."""
    copy = dict(schema)
    pending = [copy]
    while pending:
        current = pending.pop()
        edit(current)
        for key, value in list(current.items()):
            if key in _SCHEMA_MAPS and isinstance(value, dict):
                current[key], inner = _copied(value)
                pending += inner
            elif key in _SCHEMA_KEYWORDS:
                holder, inner = _copied({key: value})
                current[key] = holder[key]
                pending += inner
    return copy


def _copied(holder: JsonSchema) -> tuple[JsonSchema, list[JsonSchema]]:
    """Returns a copy of an object whose values are schemas or lists of them, and the copied
    schemas."""
    copy = {key: _copy(value) for key, value in holder.items()}
    lists = (value if isinstance(value, list) else [value] for value in copy.values())
    return copy, [item for items in lists for item in items if isinstance(item, dict)]


def _copy(value: Any) -> Any:
    if isinstance(value, list):
        return [dict(item) if isinstance(item, dict) else item for item in value]
    return dict(value) if isinstance(value, dict) else value
