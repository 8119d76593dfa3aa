"""Tells the parts of one output apart while it streams."""

from __future__ import annotations

from collections.abc import Callable

from gateway.output.parts import Format, Part, Parts
from gateway.output.reader import Reader


class OutputParser:
    """Text in, parts out. How the text is cut into pieces changes nothing but the pieces."""

    def __init__(self, output_format: Format, new_call_id: Callable[[], str]) -> None:
        self._reader = Reader()
        self._parts = Parts(new_call_id)
        self._steps = output_format(self._reader, self._parts)
        self._has_ended = False

    @property
    def has_calls(self) -> bool:
        return self._parts.has_calls

    @property
    def is_reasoning(self) -> bool:
        """Whether the text that comes now is reasoning."""
        return self._parts.is_reasoning

    def push(self, text: str) -> list[Part]:
        """Returns the parts that this text completes."""
        self._reader.feed(text)
        return self._advance()

    def flush(self) -> list[Part]:
        """Returns the parts that were held back: the output has ended."""
        self._reader.end()
        found = self._advance()
        self._parts.finish()
        return found + self._parts.take()

    def _advance(self) -> list[Part]:
        if not self._has_ended:
            self._has_ended = next(self._steps, "over") is not None
        if self._has_ended:  # a format may leave text behind that it has no use for
            self._reader.rest()
        return self._parts.take()
