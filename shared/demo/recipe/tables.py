"""Readers for the hand-written fact tables beside this module (``tables/*.txt``).

A table line is ``field | field | ...``; lines starting with ``# `` are comments.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

Exchange = tuple[str, str]
"""One question and its answer."""
Maker = Callable[[random.Random], Exchange]
"""Draws one exchange; everything random comes from the given generator."""

TABLES = Path(__file__).parent / "tables"


@cache
def rows(name: str) -> tuple[tuple[str, ...], ...]:
    """All rows of ``tables/NAME.txt``, each split at ``|`` and stripped."""
    lines = (TABLES / f"{name}.txt").read_text(encoding="utf-8").splitlines()
    return tuple(
        tuple(field.strip() for field in line.split("|"))
        for line in lines
        if line.strip() and not line.startswith("# ")
    )


@cache
def lists(name: str) -> dict[str, tuple[str, ...]]:
    """A two-column table as ``{key: comma-separated members}``."""
    return {key: tuple(m.strip() for m in members.split(",")) for key, members in rows(name)}


@cache
def snippets() -> tuple[tuple[str, str], ...]:
    """Pairs (description, code) of ``tables/snippets.txt``."""
    text = (TABLES / "snippets.txt").read_text(encoding="utf-8")
    parts = [part.split("\n", 1) for part in text.split("### ") if part.strip()]
    return tuple((head.strip(), code.rstrip("\n")) for head, code in parts)


def pick(rng: random.Random, *choices: str) -> str:
    """One of the choices, the first three times as likely: models like a clear favourite."""
    return rng.choices(choices, weights=[3] + [1] * (len(choices) - 1))[0]


def capitalised(text: str) -> str:
    """``text`` with its first letter in upper case, the rest untouched."""
    return text[:1].upper() + text[1:]


def with_article(noun: str) -> str:
    """``a cat``, ``an owl``; a noun that already has an article stays as it is."""
    if noun.startswith(("a ", "an ", "the ")):
        return noun
    return f"{'an' if noun[0].lower() in 'aeiou' else 'a'} {noun}"


def joined(items: Sequence[str]) -> str:
    """``a, b and c``."""
    return items[0] if len(items) == 1 else ", ".join(items[:-1]) + " and " + items[-1]


def numbered(items: Sequence[str]) -> str:
    """The items as a numbered list, one a line."""
    return "\n".join(f"{i}. {item}" for i, item in enumerate(items, 1))


def bulleted(items: Sequence[str]) -> str:
    """The items as a list with dashes, one a line."""
    return "\n".join(f"- {item}" for item in items)
