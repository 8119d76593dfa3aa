"""Text that arrives in pieces, read by a coroutine that waits for more.

Every method that may wait is a generator: `yield from` it. Where the pieces are cut has no effect
on what is read.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Sequence
from typing import TypeVar

from shared.text.stop_strings import held_length

T = TypeVar("T")
Waiting = Generator[None, None, T]
Emit = Callable[[str], None]

_SPACE = " \t\r\n"
_STRUCTURE = re.compile(r'["{}\[\]]')
_IN_STRING = re.compile(r'["\\]')
_AFTER_SCALAR = re.compile(r"[,}\]\s]")


class Reader:
    """Text that has arrived and is not read yet.

    Attributes:
        num_fed: characters that have arrived since the start.
    """

    def __init__(self) -> None:
        self.num_fed = 0
        self._text = ""
        self._has_ended = False

    @property
    def num_read(self) -> int:
        """Characters read since the start."""
        return self.num_fed - len(self._text)

    def feed(self, text: str) -> None:
        """Adds text."""
        self._text += text
        self.num_fed += len(text)

    def end(self) -> None:
        """There will be no more."""
        self._has_ended = True

    def copy_until(self, markers: Sequence[str], emit: Emit) -> Waiting[str | None]:
        """Hands text to `emit` up to the first marker, and reads past that.

        Text that may be the beginning of a marker is held back.

        Returns:
            The marker; None at the end of the text.
        """
        while True:
            found = [(start, m) for m in markers if (start := self._text.find(m)) >= 0]
            if found:
                start, marker = min(found)
                self._emit(start, emit)
                self._text = self._text[len(marker) :]
                return marker
            num_held = 0 if self._has_ended else held_length(self._text, markers)
            self._emit(len(self._text) - num_held, emit)
            if self._has_ended:
                return None
            yield

    def take_until(self, markers: Sequence[str]) -> Waiting[tuple[str, str | None]]:
        """Returns the text up to the first marker, and the marker; None at the end."""
        parts: list[str] = []
        marker = yield from self.copy_until(markers, parts.append)
        return "".join(parts), marker

    def take(self, text: str) -> Waiting[bool]:
        """Reads past `text` if it comes next; returns whether it did."""
        while True:
            if self._text.startswith(text):
                self._text = self._text[len(text) :]
                return True
            if self._has_ended or not text.startswith(self._text):
                return False
            yield

    def take_space(self) -> Waiting[str]:
        """Reads past white space and returns it."""
        space = ""
        while True:
            rest = self._text.lstrip(_SPACE)
            space += self._text[: len(self._text) - len(rest)]
            self._text = rest
            if rest or self._has_ended:
                return space
            yield

    def take_to(self, end: re.Pattern[str]) -> Waiting[str]:
        """Returns the text before the first match of a pattern of one character, which stays."""
        text = ""
        while True:
            match = end.search(self._text)
            length = len(self._text) if match is None else match.start()
            text += self._text[:length]
            self._text = self._text[length:]
            if match is not None or self._has_ended:
                return text
            yield

    def unread(self, text: str) -> None:
        """Puts text back, to be read again."""
        self._text = text + self._text

    def peek(self) -> Waiting[str]:
        """Returns the next character without reading it; empty at the end."""
        while not self._text and not self._has_ended:
            yield
        return self._text[:1]

    def rest(self) -> str:
        """Reads and returns everything that has arrived."""
        text, self._text = self._text, ""
        return text

    def copy_json(self, emit: Emit) -> Waiting[bool]:
        """Hands one JSON value to `emit` as it comes; returns whether it came to its end."""
        first = yield from self.peek()
        if first == '"':
            return (yield from self._copy_string(emit))
        if first not in ("{", "["):
            return (yield from self._copy_scalar(emit))
        depth = 0
        while True:
            match = _STRUCTURE.search(self._text)
            if match is None:
                self._emit(len(self._text), emit)
                if self._has_ended:
                    return False
                yield
                continue
            if match[0] == '"':
                self._emit(match.start(), emit)
                if not (yield from self._copy_string(emit)):
                    return False
                continue
            depth += 1 if match[0] in "{[" else -1
            self._emit(match.end(), emit)
            if depth == 0:
                return True

    def take_json(self) -> Waiting[str]:
        """Returns one JSON value as it is written, perhaps cut off."""
        parts: list[str] = []
        yield from self.copy_json(parts.append)
        return "".join(parts)

    def _copy_string(self, emit: Emit) -> Waiting[bool]:
        self._emit(1, emit)  # the opening quote
        while True:
            match = _IN_STRING.search(self._text)
            if match is not None and match[0] == '"':
                self._emit(match.end(), emit)
                return True
            if match is not None and match.end() < len(self._text):
                self._emit(match.end() + 1, emit)
                continue
            # A backslash waits for what it escapes.
            self._emit(len(self._text) if match is None else match.start(), emit)
            if self._has_ended:
                self._emit(len(self._text), emit)
                return False
            yield

    def _copy_scalar(self, emit: Emit) -> Waiting[bool]:
        while True:
            match = _AFTER_SCALAR.search(self._text)
            self._emit(len(self._text) if match is None else match.start(), emit)
            if match is not None or self._has_ended:
                return match is not None
            yield

    def _emit(self, length: int, emit: Emit) -> None:
        text, self._text = self._text[:length], self._text[length:]
        if text:
            emit(text)
