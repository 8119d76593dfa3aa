"""Stop strings and regular expressions in text that arrives in pieces."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import regex

from shared.errors import InvalidArgument
from shared.text import StopStrings

_FIELD = "stop_regex"
_TIMEOUT_S = 0.05
_CONTEXT_CHARACTERS = 64
"""Text before what is held back, for patterns that look behind."""


@dataclass(frozen=True, slots=True)
class StopPattern:
    """A regular expression that ends the output.

    Attributes:
        source: as the client wrote it.
        compiled: of the `regex` package, which has no types.
    """

    source: str
    compiled: Any

    @classmethod
    def of(cls, source: str) -> StopPattern:
        """Raises:
        InvalidArgument: it is no pattern, or matches nothing at all.
        """
        try:
            pattern = cls(source, regex.compile(source, cache_pattern=False))
        except (regex.error, OverflowError, RecursionError) as error:
            message = f"{_FIELD} {source[:80]!r} is no regular expression: {error}"
            raise InvalidArgument.of("STOP_REGEX_INVALID", _FIELD, message) from error
        if pattern.search("", 0) is not None:
            message = f"{_FIELD} {source[:80]!r} matches the empty text, so it would stop at once"
            raise InvalidArgument.of("STOP_REGEX_INVALID", _FIELD, message)
        return pattern

    def search(self, text: str, start: int, *, partial: bool = False) -> tuple[int, int] | None:
        """Returns start and end of the first match from `start` on.

        Args:
            partial: the beginning of a match at the end of the text is one, too.

        Raises:
            InvalidArgument: it takes too long.
        """
        try:
            found = self.compiled.search(text, start, partial=partial, timeout=_TIMEOUT_S)
        except TimeoutError as error:
            message = f"{_FIELD} {self.source[:80]!r} takes longer than {_TIMEOUT_S:g} s"
            raise InvalidArgument.of("STOP_REGEX_SLOW", _FIELD, message) from error
        return None if found is None else found.span()


class StopPatterns:
    """Finds the first match of a stop string or of a pattern, as soon as there is one.

    Text is held back only while it may be the beginning of a match. Used like `StopStrings`.

    Attributes:
        matched: the stop string, or the pattern as it was written.
    """

    def __init__(
        self, strings: StopStrings, patterns: Sequence[StopPattern], *, include_in_output: bool
    ) -> None:
        self._strings = strings
        self._patterns = tuple(patterns)
        self._include_in_output = include_in_output
        self._text = ""
        self._num_sent = 0
        self.matched: str | None = None

    def push(self, text: str) -> str:
        """Returns the text that is safe to send. After a match that is all there will be.

        Raises:
            InvalidArgument: a pattern takes too long.
        """
        assert self.matched is None, "no text comes after a stop"
        self._text += self._strings.push(text)
        found = [
            (end, start, pattern.source)
            for pattern in self._patterns
            for start, end in [pattern.search(self._text, self._num_sent) or (0, 0)]
            if end
        ]
        if found:
            end, start, self.matched = min(found)
            return self._taken(end if self._include_in_output else start)
        self.matched = self._strings.matched
        return self._taken(self._safe_end() if self.matched is None else len(self._text))

    def flush(self) -> str:
        """Returns the text held back: nothing completed it."""
        self._text += self._strings.flush()
        return self._taken(len(self._text))

    def _taken(self, end: int) -> str:
        taken = self._text[self._num_sent : end]
        kept_from = max(end - _CONTEXT_CHARACTERS, 0)
        self._text, self._num_sent = self._text[kept_from:], end - kept_from
        return taken

    def _safe_end(self) -> int:
        """Returns the first character that may begin a match."""
        begun = [each.search(self._text, self._num_sent, partial=True) for each in self._patterns]
        return min((span[0] for span in begun if span is not None), default=len(self._text))
