"""Splits an output into reasoning and answer: by tags, or by the channels of harmony.

Harmony is the format of gpt-oss: messages on channels, each message with a header before its text.
`<|channel|>analysis<|message|>…<|end|><|start|>assistant<|channel|>final<|message|>…`; a call is a
message `to=functions.NAME`. The prompt ends with `<|start|>assistant`.

Source: OpenAI, "OpenAI Harmony Response Format"."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from gateway.output.parser import Emit, Format, Parts, Reader, Steps

START, CHANNEL, MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
HARMONY_MARKS = (START, CHANNEL, MESSAGE, "<|end|>", "<|call|>", "<|return|>", "<|constrain|>")
_ENDS = ("<|end|>", "<|call|>", "<|return|>", START)
_RECIPIENT = re.compile(r"to=(?:functions\.)?([\w.-]+)")


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
