"""The parts of an output: text, reasoning and tool calls."""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import TypeAlias

from gateway.output.reader import Reader


@dataclass(frozen=True, slots=True)
class Content:
    """Text meant for the user."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """Text the model thinks with."""

    text: str


@dataclass(frozen=True, slots=True)
class CallBegun:
    """A call of a tool, of which the name is known.

    Attributes:
        index: of the call in the output, from 0.
    """

    index: int
    call_id: str
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """More of a call's arguments. All of them joined are what the model wrote, JSON if it is."""

    index: int
    text: str


Part: TypeAlias = Content | Reasoning | CallBegun | CallArguments


class Parts:
    """Collects the parts that a format finds.

    White space around calls and after reasoning is layout, not content; that of a plain answer is
    kept.

    Attributes:
        is_reasoning: whether the text that comes now is reasoning.
    """

    def __init__(self, reader: Reader, new_call_id: Callable[[], str]) -> None:
        self._reader = reader
        self._new_call_id = new_call_id
        self._found: list[Part] = []
        self._is_reasoning = False
        self._turns: list[int] = []
        self._num_calls = 0
        self._space = ""
        self._is_margin = True
        self._is_set_apart = False

    @property
    def has_calls(self) -> bool:
        return self._num_calls > 0

    @property
    def is_reasoning(self) -> bool:
        return self._is_reasoning

    @is_reasoning.setter
    def is_reasoning(self, value: bool) -> None:
        if value != self._is_reasoning:
            self._is_reasoning = value
            self._turns.append(self._reader.num_read)

    def take_turns(self) -> list[int]:
        """Returns the characters read at each change of `is_reasoning` since the last time."""
        turns, self._turns = self._turns, []
        return turns

    def content(self, text: str) -> None:
        """Adds text for the user."""
        if self._is_margin:
            text = self._space + text
            if not text.strip():
                self._space = text
                return
            text = text.lstrip() if self._is_set_apart else text
            self._is_margin, self._space = False, ""
        self._add(Content(text))

    def reasoning(self, text: str) -> None:
        """Adds reasoning."""
        if text:
            self._is_set_apart = True
            self._add(Reasoning(text))

    def begin_call(self, name: str, call_id: str | None = None) -> Callable[[str], None]:
        """Adds a call; returns what takes its arguments.

        Args:
            call_id: that the model wrote itself.
        """
        index = self._num_calls
        self._num_calls += 1
        self._is_margin, self._is_set_apart, self._space = True, True, ""
        self._found.append(CallBegun(index, call_id or self._new_call_id(), name))

        return lambda text: self._add(CallArguments(index, text))

    def _add(self, part: Content | Reasoning | CallArguments) -> None:
        """Adds text, to the last part where that is of the same kind."""
        last = self._found[-1] if self._found else None
        if isinstance(part, Content) and isinstance(last, Content):
            self._found[-1] = Content(last.text + part.text)
        elif isinstance(part, Reasoning) and isinstance(last, Reasoning):
            self._found[-1] = Reasoning(last.text + part.text)
        elif isinstance(part, CallArguments) and isinstance(last, CallArguments):
            self._found[-1] = CallArguments(part.index, last.text + part.text)
        elif part.text:
            self._found.append(part)

    def finish(self) -> None:
        """Adds what an answer of white space alone consists of."""
        if self._is_margin and not self._is_set_apart and self._space:
            self._found.append(Content(self._space))
        self._space = ""

    def take(self) -> list[Part]:
        """Returns the parts found since the last call."""
        found, self._found = self._found, []
        return found


Steps: TypeAlias = Generator[None, None, None]
"""A format at work: it reads, adds parts, and yields where it needs more text."""

Format: TypeAlias = Callable[[Reader, Parts], Steps]
