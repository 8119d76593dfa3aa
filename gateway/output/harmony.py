"""Harmony, the format of gpt-oss: messages on channels, each with a header before its text.

`<|channel|>analysis<|message|>…<|end|><|start|>assistant<|channel|>final<|message|>…`; a call is a
message `to=functions.NAME`. The prompt ends with `<|start|>assistant`.

Source: OpenAI, "OpenAI Harmony Response Format".
"""

from __future__ import annotations

import re

from gateway.output.parts import Parts, Steps
from gateway.output.reader import Emit, Reader

START, CHANNEL, MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
_ENDS = ("<|end|>", "<|call|>", "<|return|>", START)
_RECIPIENT = re.compile(r"to=(?:functions\.)?([\w.-]+)")


def harmony(reader: Reader, parts: Parts) -> Steps:
    """A `Format`."""
    while True:
        header, marker = yield from reader.take_until((MESSAGE,))
        if marker is None:
            if CHANNEL not in header and START not in header:
                parts.content(header)  # a model that left its format
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
