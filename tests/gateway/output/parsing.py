"""Outputs cut into pieces, parsed, and joined again."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence

from hypothesis import strategies as st

from gateway.output.parser import (
    CallArguments,
    CallBegun,
    Content,
    Format,
    OutputParser,
    Part,
    Reasoning,
)

Calls = list[tuple[str, str]]
Whole = tuple[str, Calls, str]

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=8,
)


def parse(output_format: Format, pieces: Sequence[str]) -> list[Part]:
    """Returns the parts of an output that comes in pieces."""
    numbers = itertools.count()
    parser = OutputParser(output_format, lambda: f"call_{next(numbers)}")
    found = [part for piece in pieces for part in parser.push(piece)]
    found += parser.flush()
    assert parser.has_calls is any(isinstance(part, CallBegun) for part in found)
    return found


def whole(parts: Sequence[Part]) -> Whole:
    """Returns content, calls and reasoning; a call must begin before its arguments, in order."""
    calls: list[list[str]] = []
    for part in parts:
        if isinstance(part, CallBegun):
            assert part.index == len(calls)
            written = rf"(functions\.)?{re.escape(part.name)}(:\d+)?"  # Kimi's, by the model itself
            assert part.call_id == f"call_{part.index}" or re.fullmatch(written, part.call_id)
            calls.append([part.name, ""])
        elif isinstance(part, CallArguments):
            assert part.index == len(calls) - 1
            calls[part.index][1] += part.text
    content = "".join(part.text for part in parts if isinstance(part, Content))
    reasoning = "".join(part.text for part in parts if isinstance(part, Reasoning))
    return content, [(name, arguments) for name, arguments in calls], reasoning


def cut_anywhere(text: str, data: st.DataObject) -> list[str]:
    """Returns a text in a few pieces."""
    places = st.sets(st.integers(1, max(1, len(text))), max_size=8)
    cuts = sorted(data.draw(places))
    return [text[start:end] for start, end in itertools.pairwise([0, *cuts, len(text)])]


def check_every_cut(output_format: Format, text: str, expected: Whole) -> None:
    """Checks a text in one piece, in characters, and cut in two at every place."""
    assert whole(parse(output_format, [text])) == expected
    assert whole(parse(output_format, list(text))) == expected
    for cut in range(1, len(text)):
        pieces = [text[:cut], text[cut:]]
        assert whole(parse(output_format, pieces)) == expected, pieces
