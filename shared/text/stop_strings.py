"""Stop strings in text that arrives in pieces."""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """Finds the first stop string to be completed, however the text is cut into pieces.

    Text is held back only while it may be the beginning of a stop string. When several stop
    strings end at the same character, the longest counts.
    """

    def __init__(self, stop_strings: Sequence[str], *, include_in_output: bool = False) -> None:
        assert all(stop_strings), "an empty stop string would match everywhere"
        self._stop_strings = tuple(stop_strings)
        self._include_in_output = include_in_output
        self._held = ""
        self.matched: str | None = None

    def push(self, text: str) -> str:
        """Returns the text that is safe to send. After a match that is all there will be."""
        assert self.matched is None, "no text comes after a stop string"
        if not self._stop_strings:
            return text
        text = self._held + text
        match = self._first_match(text)
        if match is not None:
            start, end = match
            self.matched, self._held = text[start:end], ""
            return text[: end if self._include_in_output else start]
        num_held = held_length(text, self._stop_strings)
        self._held = text[len(text) - num_held :]
        return text[: len(text) - num_held]

    def flush(self) -> str:
        """Returns the text held back: nothing completed it."""
        held, self._held = self._held, ""
        return held

    def _first_match(self, text: str) -> tuple[int, int] | None:
        found = (
            (start + len(stop), start)
            for stop in self._stop_strings
            if (start := text.find(stop)) >= 0
        )
        end, start = min(found, default=(0, 0))
        return (start, end) if end else None


def held_length(text: str, strings: Sequence[str]) -> int:
    """Returns the length of the longest end of `text` that begins one of the strings."""
    longest = 0
    for string in strings:
        longest = max(longest, _overlap(text, string))
    return longest


def _overlap(text: str, stop: str) -> int:
    """Looks only where the first character of `stop` is, which is hardly ever anywhere."""
    start = text.find(stop[0], max(len(text) - len(stop) + 1, 0))
    while start >= 0:
        if stop.startswith(text[start:]):
            return len(text) - start
        start = text.find(stop[0], start + 1)
    return 0
