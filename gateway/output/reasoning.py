"""Splits an output into reasoning and answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gateway.output.parts import Format, Parts, Steps
from gateway.output.reader import Reader


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
    answer: Format,
    *,
    starts_inside: bool,
    tags: ThinkTags = THINK,
    call_marks: Sequence[str] = (),
) -> Format:
    """`<think>…</think>`, then the answer: DeepSeek R1, Qwen 3 and others.

    Args:
        answer: the format of what follows.
        starts_inside: the prompt, or the model by habit, has opened the reasoning already.
        call_marks: special tokens that begin a call. They end the reasoning as well: models
            forget to close it.
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
    """Everything is for the user."""
    yield from reader.copy_until((), parts.content)
