"""The families of models by the way they write calls and reasoning, and how to tell them."""

from __future__ import annotations

import enum
from collections.abc import Mapping

from gateway.output import tool_formats as marks
from gateway.output.harmony import CHANNEL, MESSAGE, START
from gateway.output.pythonic_calls import PYTHON_END, PYTHON_START, PYTHON_TAG
from gateway.output.reasoning import KIMI_THINK, MISTRAL_THINK, SEED_THINK, THINK, ThinkTags
from gateway.output.tagged_calls import FAMILIES, GLM, MINIMAX, QWEN3_CODER, SEED_OSS

# Llama's templates show the form with these names.
_PYTHONIC_EXAMPLE = "[func_name1("
HARMONY_MARKS = (START, CHANNEL, MESSAGE, "<|end|>", "<|call|>", "<|return|>", "<|constrain|>")
_DEEPSEEK_MARKS = (
    *(marks.DEEPSEEK_CALLS, marks.DEEPSEEK_CALLS_END, marks.DEEPSEEK_SEP),
    *(marks.DEEPSEEK_CALL, marks.DEEPSEEK_CALL_END),
)
MARKS: Mapping[str, tuple[str, ...]] = {
    **{family: tags.marks for family, tags in FAMILIES.items()},
    "hermes": (marks.HERMES_BEGIN, marks.HERMES_END),
    "llama3": (PYTHON_TAG,),
    "pythonic": (PYTHON_TAG, PYTHON_START, PYTHON_END),
    "mistral": (marks.MISTRAL_BEGIN, marks.MISTRAL_ARGS, marks.MISTRAL_ID),
    "deepseek": _DEEPSEEK_MARKS,
    "deepseek-v3.1": _DEEPSEEK_MARKS,
    "kimi-k2": (
        *(marks.KIMI_CALLS, marks.KIMI_CALLS_END, marks.KIMI_ARGS),
        *(marks.KIMI_CALL, marks.KIMI_CALL_END),
    ),
    "harmony": HARMONY_MARKS,
}
# Of the families whose marks are single tokens, so that no reasoning can be about them.
CALLS_THAT_END_REASONING = {
    "deepseek": (marks.DEEPSEEK_CALLS,),
    "deepseek-v3.1": (marks.DEEPSEEK_CALLS,),
    "kimi-k2": (marks.KIMI_CALLS,),
}


class ToolCallParser(enum.Enum):
    """Families of tool calls."""

    AUTO = "auto"
    NONE = "none"
    HERMES = "hermes"
    LLAMA3 = "llama3"
    MISTRAL = "mistral"
    DEEPSEEK = "deepseek"
    DEEPSEEK_V3_1 = "deepseek-v3.1"
    HARMONY = "harmony"
    QWEN3_CODER = "qwen3-coder"
    PYTHONIC = "pythonic"
    KIMI_K2 = "kimi-k2"
    GLM45 = "glm45"
    MINIMAX_M2 = "minimax-m2"
    SEED_OSS = "seed-oss"


class ReasoningParser(enum.Enum):
    """Ways to tell reasoning from the answer."""

    AUTO = "auto"
    NONE = "none"
    QWEN3 = "qwen3"
    DEEPSEEK_R1 = "deepseek-r1"
    HARMONY = "harmony"
    KIMI = "kimi"
    MISTRAL = "mistral"
    SEED_OSS = "seed-oss"

    @property
    def tags(self) -> ThinkTags:
        """The tags around reasoning; `<think>` unless the family has its own."""
        own = {"kimi": KIMI_THINK, "mistral": MISTRAL_THINK, "seed-oss": SEED_THINK}
        return own.get(self.value, THINK)


def tools_of(source: str) -> ToolCallParser:
    """Returns the family by the first mark of its own; `<tool_call>` alone is Hermes'."""
    families = (
        (CHANNEL, ToolCallParser.HARMONY),
        (marks.MISTRAL_BEGIN, ToolCallParser.MISTRAL),
        (marks.KIMI_CALLS, ToolCallParser.KIMI_K2),
        (MINIMAX.begin, ToolCallParser.MINIMAX_M2),
        (SEED_OSS.begin, ToolCallParser.SEED_OSS),
        (GLM.key, ToolCallParser.GLM45),
        (QWEN3_CODER.key, ToolCallParser.QWEN3_CODER),
        (_PYTHONIC_EXAMPLE, ToolCallParser.PYTHONIC),
    )
    for mark, family in families:
        if mark in source:
            return family
    if marks.DEEPSEEK_CALLS in source:
        is_fenced = "```json" in source
        return ToolCallParser.DEEPSEEK if is_fenced else ToolCallParser.DEEPSEEK_V3_1
    is_llama = "<|start_header_id|>" in source or "<|header_start|>" in source
    if is_llama and marks.HERMES_BEGIN not in source:
        return ToolCallParser.LLAMA3
    return ToolCallParser.HERMES


def reasoning_of(source: str) -> ReasoningParser:
    """Returns how a template sets reasoning apart."""
    if CHANNEL in source:
        return ReasoningParser.HARMONY
    parsers = (ReasoningParser.KIMI, ReasoningParser.MISTRAL, ReasoningParser.SEED_OSS)
    for parser in (*parsers, ReasoningParser.QWEN3):
        if parser.tags.end in source:
            return parser
    return ReasoningParser.NONE
