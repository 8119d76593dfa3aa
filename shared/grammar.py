"""Constraints on an output, as clients write them. Compiled on the target, never on the gateway."""

from __future__ import annotations

import enum
from dataclasses import dataclass


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
