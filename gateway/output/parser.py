"""Tells the parts of one output apart while it streams."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from gateway.output.parts import Format, Part, Parts
from gateway.output.reader import Reader


class OutputParser:
    """Text in, parts out. How the text is cut into pieces changes nothing but the pieces.

    Attributes:
        num_reasoning_tokens: of the tokens pushed so far.
    """

    def __init__(self, output_format: Format, new_call_id: Callable[[], str]) -> None:
        self._reader = Reader()
        self._parts = Parts(self._reader, new_call_id)
        self._steps = output_format(self._reader, self._parts)
        self._has_ended = False
        self.num_reasoning_tokens = 0

    @property
    def has_calls(self) -> bool:
        return self._parts.has_calls

    def push(self, text: str) -> list[Part]:
        """Returns the parts that this text completes."""
        self._reader.feed(text)
        return self._advance()

    def push_tokens(self, texts: Sequence[str]) -> list[Part]:
        """Returns the parts that the texts of the next tokens complete; counts reasoning.

        A token is reasoning when some of its characters are; the mark that ends it belongs to it.
        """
        is_reasoning, num_fed = self._parts.is_reasoning, self._reader.num_fed
        found = self.push("".join(texts))
        turns = self._parts.take_turns()
        if turns:
            self.num_reasoning_tokens += _num_reasoning(texts, num_fed, is_reasoning, turns)
        elif is_reasoning:
            self.num_reasoning_tokens += len(texts)
        return found

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


def _num_reasoning(texts: Sequence[str], end: int, is_reasoning: bool, turns: list[int]) -> int:
    """Args:
    end: characters before the texts.
    is_reasoning: whether they begin with reasoning.
    turns: characters before each change of that, ascending.
    """
    number = 0
    for text in texts:
        begin, end = end, end + len(text)
        while turns and turns[0] <= begin:
            is_reasoning, turns = not is_reasoning, turns[1:]
        holds_some = is_reasoning
        while turns and turns[0] < end:
            is_reasoning, turns = not is_reasoning, turns[1:]
            holds_some |= is_reasoning
        number += holds_some
    return number
