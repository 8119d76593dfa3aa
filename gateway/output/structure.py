"""The formats of XGrammar's structural tags that the gateway writes; the target compiles them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

Tag = dict[str, Any]

ANY_TEXT: Tag = {"type": "any_text"}


def tag(begin: str, content: Tag, end: str) -> Tag:
    """Returns content between two texts; free text ends at the first `end`."""
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def text(value: str) -> Tag:
    """Returns one text and no other."""
    return {"type": "const_string", "value": value}


def regex(pattern: str) -> Tag:
    """Returns what a regular expression matches as a whole."""
    return {"type": "regex", "pattern": pattern}


def json_schema(schema: Mapping[str, Any]) -> Tag:
    """Returns JSON that keeps to a schema."""
    return {"type": "json_schema", "json_schema": dict(schema)}


def sequence(*elements: Tag) -> Tag:
    """Returns one after the other."""
    return {"type": "sequence", "elements": list(elements)}


def any_of(elements: Sequence[Tag]) -> Tag:
    """Returns one of several."""
    return {"type": "or", "elements": list(elements)}


def optional(content: Tag) -> Tag:
    """Returns content or nothing."""
    return any_of([content, text("")])
