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
"""Characters kept before the held-back text, for patterns with look-behind."""


@dataclass(frozen=True, slots=True)
class StopPattern:
    """A regular expression that ends the output.

    Attributes:
        source: as the client wrote it.
        compiled: pattern of the `regex` package, which has no types.
    """

    source: str
    compiled: Any

    @classmethod
    def of(cls, source: str) -> StopPattern:
        """Raises:
        InvalidArgument: it is no pattern, or matches the empty text.
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
        """Returns start and end of the first match at or after `start`.

        Args:
            partial: also find the beginning of a match at the end of the text.

        Raises:
            InvalidArgument: the search takes too long.
        """
        try:
            match = self.compiled.search(text, start, partial=partial, timeout=_TIMEOUT_S)
        except TimeoutError as error:
            message = f"{_FIELD} {self.source[:80]!r} takes longer than {_TIMEOUT_S:g} s"
            raise InvalidArgument.of("STOP_REGEX_SLOW", _FIELD, message) from error
        return None if match is None else match.span()


class StopPatterns:
    """Finds the first match of a stop string or of a pattern in streamed text.

    Text is held back only while it may be the beginning of a match. Used like `StopStrings`.

    Attributes:
        matched: the stop string, or the source of the pattern; None before a match.
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
        """Returns the text that is safe to send; after a match it is the last text.

        Raises:
            InvalidArgument: a pattern takes too long.
        """
        assert self.matched is None, "no text comes after a stop"
        self._text += self._strings.push(text)
        matches = [
            (end, start, pattern.source)
            for pattern in self._patterns
            for start, end in [pattern.search(self._text, self._num_sent) or (0, 0)]
            if end
        ]
        if matches:
            end, start, self.matched = min(matches)
            return self._send_to(end if self._include_in_output else start)
        self.matched = self._strings.matched
        return self._send_to(self._safe_end() if self.matched is None else len(self._text))

    def flush(self) -> str:
        """Returns the held-back text at the end of the output."""
        self._text += self._strings.flush()
        return self._send_to(len(self._text))

    def _send_to(self, end: int) -> str:
        text = self._text[self._num_sent : end]
        kept_from = max(end - _CONTEXT_CHARACTERS, 0)
        self._text, self._num_sent = self._text[kept_from:], end - kept_from
        return text

    def _safe_end(self) -> int:
        """Returns the index of the first character that may begin a match."""
        text, start = self._text, self._num_sent
        spans = [pattern.search(text, start, partial=True) for pattern in self._patterns]
        return min((span[0] for span in spans if span is not None), default=len(text))
