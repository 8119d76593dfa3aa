"""Where reasoning ends and the answer begins."""

from __future__ import annotations

from gateway.output.parts import Format, Parts, Steps
from gateway.output.reader import Reader

THINK, THINK_END = "<think>", "</think>"


def thinking(answer: Format, *, starts_inside: bool) -> Format:
    """`<think>…</think>`, then the answer: DeepSeek R1, Qwen 3 and others.

    Args:
        answer: the format of what follows.
        starts_inside: the prompt, or the model by habit, has opened the reasoning already.
    """

    def read(reader: Reader, parts: Parts) -> Steps:
        space = yield from reader.take_space()
        if (yield from reader.take(THINK)) or starts_inside:
            yield from reader.take_space()
            parts.is_reasoning = True
            if (yield from reader.copy_until((THINK_END,), parts.reasoning)) is None:
                return
            parts.is_reasoning = False
            yield from reader.take_space()
        elif space:
            parts.content(space)
        yield from answer(reader, parts)

    return read


def text_only(reader: Reader, parts: Parts) -> Steps:
    """Everything is for the user."""
    yield from reader.copy_until((), parts.content)
