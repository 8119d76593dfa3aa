"""Splits one streamed output into its parts: text, reasoning and tool calls.

A format is a coroutine that reads text and waits for more. Every method of `Reader` that may wait
is a generator: `yield from` it. Where the stream is cut into pieces has no effect on the parts.

Reasoning is set apart by tags, or by the channels of harmony, the format of gpt-oss: messages on
channels, each message with a header before its text.
`<|channel|>analysis<|message|>…<|end|><|start|>assistant<|channel|>final<|message|>…`; a call is a
message `to=functions.NAME`. The prompt ends with `<|start|>assistant`.

Source: OpenAI, "OpenAI Harmony Response Format"."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import TypeAlias, TypeVar

from shared.text import held_length

T = TypeVar("T")
Waiting = Generator[None, None, T]
Emit = Callable[[str], None]

_SPACE = " \t\r\n"
_STRUCTURE = re.compile(r'["{}\[\]]')
_IN_STRING = re.compile(r'["\\]')
_AFTER_SCALAR = re.compile(r"[,}\]\s]")

Steps: TypeAlias = Generator[None, None, None]
"""A running format: it reads text, adds parts, and yields where it needs more text."""
START, CHANNEL, MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
HARMONY_MARKS = (START, CHANNEL, MESSAGE, "<|end|>", "<|call|>", "<|return|>", "<|constrain|>")
_ENDS = ("<|end|>", "<|call|>", "<|return|>", START)
_RECIPIENT = re.compile(r"to=(?:functions\.)?([\w.-]+)")


class Reader:
    """Text that has arrived and is not read yet.

    Attributes:
        num_fed: number of characters that have arrived since the start.
    """

    def __init__(self) -> None:
        self.num_fed = 0
        self._text = ""
        self._seen: str | None = None
        self._has_ended = False

    @property
    def num_read(self) -> int:
        """Number of characters read since the start."""
        return self.num_fed - len(self._text)

    def feed(self, text: str) -> None:
        """Adds text."""
        self._text += text
        self.num_fed += len(text)

    def end(self) -> None:
        """Marks the end of the text."""
        self._has_ended = True

    def copy_until(self, markers: Sequence[str], emit: Emit) -> Waiting[str | None]:
        """Passes text up to the first marker to `emit`, and reads past the marker.

        Text that may be the beginning of a marker is held back.

        Returns:
            The marker; None at the end of the text.
        """
        while True:
            matches = [(start, m) for m in markers if (start := self._text.find(m)) >= 0]
            if matches:
                start, marker = min(matches)
                self._emit(start, emit)
                return self._advance(len(marker))
            num_held = 0 if self._has_ended else held_length(self._text, markers)
            self._emit(len(self._text) - num_held, emit)
            if self._has_ended:
                return None
            yield

    def take_until(self, markers: Sequence[str]) -> Waiting[tuple[str, str | None]]:
        """Returns the text up to the first marker, and the marker; None at the end of the text."""
        parts: list[str] = []
        marker = yield from self.copy_until(markers, parts.append)
        return "".join(parts), marker

    def take(self, text: str) -> Waiting[bool]:
        """Reads past `text` if it comes next; returns whether it came next."""
        while True:
            if self._text.startswith(text):
                self._advance(len(text))
                return True
            if self._has_ended or not text.startswith(self._text):
                return False
            yield

    def take_space(self) -> Waiting[str]:
        """Reads past white space and returns it."""
        space = ""
        while True:
            rest = self._text.lstrip(_SPACE)
            space += self._advance(len(self._text) - len(rest))
            if rest or self._has_ended:
                return space
            yield

    def take_to(self, end: re.Pattern[str]) -> Waiting[str]:
        """Reads and returns the text before the first match of a one-character pattern."""
        text = ""
        while True:
            match = end.search(self._text)
            text += self._advance(len(self._text) if match is None else match.start())
            if match is not None or self._has_ended:
                return text
            yield

    def mark(self, before: str = "") -> None:
        """Begins to remember what is read, in case that it turns out to be no call.

        Args:
            before: text that was read before and belongs to it.
        """
        self._seen = before

    def seen(self) -> str:
        """Returns the text since `mark`, and remembers no more."""
        seen, self._seen = self._seen or "", None
        return seen

    def unread(self, text: str) -> None:
        """Puts text back, to be read again."""
        self._text = text + self._text

    def peek(self) -> Waiting[str]:
        """Returns the next character without reading it; empty at the end of the text."""
        while not self._text and not self._has_ended:
            yield
        return self._text[:1]

    def rest(self) -> str:
        """Reads and returns everything that has arrived."""
        text, self._text = self._text, ""
        return text

    def copy_json(self, emit: Emit) -> Waiting[bool]:
        """Passes one JSON value to `emit` as it arrives; returns whether the value is complete."""
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
        """Returns one JSON value as written, which may be cut off."""
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
            # A backslash is held back until the character that it escapes arrives.
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
        text = self._advance(length)
        if text:
            emit(text)

    def _advance(self, length: int) -> str:
        """Reads and returns so many characters."""
        text, self._text = self._text[:length], self._text[length:]
        if self._seen is not None:
            self._seen += text
        return text


@dataclass(frozen=True, slots=True)
class Content:
    """Text meant for the user."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """Reasoning text."""

    text: str


@dataclass(frozen=True, slots=True)
class CallBegun:
    """The beginning of a tool call: its name is known.

    Attributes:
        index: index of the call in the output, from 0.
    """

    index: int
    call_id: str
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """A piece of a call's arguments. The joined pieces are the model's text, valid JSON or not."""

    index: int
    text: str


Part: TypeAlias = Content | Reasoning | CallBegun | CallArguments


def without_surrogates(text: str) -> str:
    """Returns text with U+FFFD in place of lone surrogates. Names and arguments may hold them as
    escapes, and UTF-8 has no bytes for them."""
    if text.isascii():
        return text
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


class Parts:
    """Collects the parts that a format finds.

    White space around calls and after reasoning is layout and dropped; a plain answer keeps it.

    Args:
        most_calls: further calls are dropped.

    Attributes:
        is_reasoning: whether the next text is reasoning.
    """

    def __init__(
        self, reader: Reader, new_call_id: Callable[[], str], most_calls: float = math.inf
    ) -> None:
        self._reader, self._most_calls = reader, most_calls
        self._new_call_id = new_call_id
        self._parts: list[Part] = []
        self._is_reasoning = False
        self._switches: list[int] = []
        self._num_calls = 0
        self._space = ""
        self._awaits_content = True
        self._is_answer_plain = True

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
            self._switches.append(self._reader.num_read)

    def take_switches(self) -> list[int]:
        """Returns, for each change of `is_reasoning` since the last call, the characters read by
        then."""
        switches, self._switches = self._switches, []
        return switches

    def content(self, text: str) -> None:
        """Adds text for the user."""
        if self._awaits_content:
            text = self._space + text
            if not text.strip():
                self._space = text
                return
            text = text if self._is_answer_plain else text.lstrip()
            self._awaits_content, self._space = False, ""
        self._add(Content(text))

    def reasoning(self, text: str) -> None:
        """Adds reasoning."""
        if text:
            self._is_answer_plain = False
            self._add(Reasoning(text))

    def begin_call(self, name: str, call_id: str | None = None) -> Callable[[str], None]:
        """Adds a call; returns the function that adds pieces of its arguments.

        Args:
            call_id: the id that the model wrote; None makes a new one.
        """
        index = self._num_calls
        self._awaits_content, self._is_answer_plain, self._space = True, False, ""
        if index >= self._most_calls:
            return lambda _: None
        self._num_calls += 1
        name = without_surrogates(name)
        self._parts.append(CallBegun(index, call_id or self._new_call_id(), name))

        return lambda text: self._add(CallArguments(index, without_surrogates(text)))

    def _add(self, part: Content | Reasoning | CallArguments) -> None:
        """Adds a part, merged with the last part if that is of the same kind."""
        last = self._parts[-1] if self._parts else None
        if isinstance(part, Content) and isinstance(last, Content):
            self._parts[-1] = Content(last.text + part.text)
        elif isinstance(part, Reasoning) and isinstance(last, Reasoning):
            self._parts[-1] = Reasoning(last.text + part.text)
        elif isinstance(part, CallArguments) and isinstance(last, CallArguments):
            self._parts[-1] = CallArguments(part.index, last.text + part.text)
        elif part.text:
            self._parts.append(part)

    def finish(self) -> None:
        """Adds the white space of an answer that consists of white space alone."""
        if self._awaits_content and self._is_answer_plain and self._space:
            self._parts.append(Content(self._space))
        self._space = ""

    def take(self) -> list[Part]:
        """Returns the parts found since the last call."""
        parts, self._parts = self._parts, []
        return parts


Format: TypeAlias = Callable[[Reader, Parts], Steps]


class OutputParser:
    """Runs a format over streamed text and returns the parts as they arrive.

    Attributes:
        num_reasoning_tokens: reasoning tokens among the tokens pushed so far.
    """

    def __init__(
        self, output_format: Format, new_call_id: Callable[[], str], most_calls: float = math.inf
    ) -> None:
        self._reader = Reader()
        self._parts = Parts(self._reader, new_call_id, most_calls)
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
        """Returns the parts that the texts of the next tokens complete; counts reasoning tokens.

        A token with some characters of reasoning is a reasoning token, and so is the end tag.
        """
        is_reasoning, num_fed = self._parts.is_reasoning, self._reader.num_fed
        parts = self.push("".join(texts))
        switches = self._parts.take_switches()
        if switches:
            self.num_reasoning_tokens += _num_reasoning(texts, num_fed, is_reasoning, switches)
        elif is_reasoning:
            self.num_reasoning_tokens += len(texts)
        return parts

    def flush(self) -> list[Part]:
        """Returns the parts that were held back, at the end of the output."""
        self._reader.end()
        parts = self._advance()
        self._parts.finish()
        return parts + self._parts.take()

    def _advance(self) -> list[Part]:
        if not self._has_ended:
            self._has_ended = next(self._steps, "over") is not None
        if self._has_ended:  # a format may end before the text does; the rest is dropped
            self._reader.rest()
        return self._parts.take()


def _num_reasoning(texts: Sequence[str], end: int, is_reasoning: bool, switches: list[int]) -> int:
    """Returns the number of tokens that hold some reasoning.

    Args:
        texts: texts of the tokens.
        end: characters before the texts.
        is_reasoning: whether the texts begin with reasoning.
        switches: characters before each change between reasoning and answer, ascending.
    """
    number = 0
    for text in texts:
        begin, end = end, end + len(text)
        while switches and switches[0] <= begin:
            is_reasoning, switches = not is_reasoning, switches[1:]
        holds_reasoning = is_reasoning
        while switches and switches[0] < end:
            is_reasoning, switches = not is_reasoning, switches[1:]
            holds_reasoning |= is_reasoning
        number += holds_reasoning
    return number


@dataclass(frozen=True, slots=True)
class ThinkTags:
    """The tags around reasoning."""

    begin: str
    end: str


THINK = ThinkTags("<think>", "</think>")
KIMI_THINK = ThinkTags("◁think▷", "◁/think▷")
MISTRAL_THINK = ThinkTags("[THINK]", "[/THINK]")
SEED_THINK = ThinkTags("<seed:think>", "</seed:think>")


def thinking(
    answer: Format, *, starts_inside: bool, tags: ThinkTags = THINK, call_marks: Sequence[str] = ()
) -> Format:
    """`<think>…</think>`, then the answer: DeepSeek R1, Qwen 3 and others.

    Args:
        answer: the format of the text after the reasoning.
        starts_inside: the prompt has opened the reasoning, or the model omits the opening tag.
        call_marks: special tokens that begin a call. They end the reasoning as well, because
            models forget to close it.
    """

    def read(reader: Reader, parts: Parts) -> Steps:
        space = yield from reader.take_space()
        if (yield from reader.take(tags.begin)) or starts_inside:
            yield from reader.take_space()
            parts.is_reasoning = True
            marker = yield from reader.copy_until((tags.end, *call_marks), parts.reasoning)
            if marker is None:
                return
            if marker != tags.end:
                reader.unread(marker)
            parts.is_reasoning = False
            yield from reader.take_space()
        elif space:
            parts.content(space)
        yield from answer(reader, parts)

    return read


def text_only(reader: Reader, parts: Parts) -> Steps:
    """All output is text for the user."""
    yield from reader.copy_until((), parts.content)


def harmony(reader: Reader, parts: Parts) -> Steps:
    """Messages on channels: gpt-oss."""
    while True:
        header, marker = yield from reader.take_until((MESSAGE,))
        if marker is None:
            if CHANNEL not in header and START not in header:
                parts.content(header)  # the model did not keep to the format
            return
        if (yield from reader.copy_until(_ENDS, _emit(header, parts))) is None:
            return


def _emit(header: str, parts: Parts) -> Emit:
    channel = header.rsplit(CHANNEL, 1)[-1]
    recipient = _RECIPIENT.search(header)
    if recipient is not None:
        parts.is_reasoning = False
        return parts.begin_call(recipient[1])
    parts.is_reasoning = channel.startswith("analysis")
    return parts.reasoning if parts.is_reasoning else parts.content
