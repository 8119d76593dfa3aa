"""The format of the served model's tool calls and reasoning: set by a flag, or detected from its
chat template."""

from __future__ import annotations

import enum
import math
import secrets
import string
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import orjson

from gateway.output import call_grammar, tool_formats
from gateway.output.argument_formats import GLM, MINIMAX, QWEN3_CODER, SEED_OSS
from gateway.output.call_grammar import Tag, any_of, sequence, text
from gateway.output.parser import (
    CHANNEL,
    HARMONY_MARKS,
    KIMI_THINK,
    MESSAGE,
    MISTRAL_THINK,
    SEED_THINK,
    THINK,
    Format,
    ThinkTags,
    harmony,
    text_only,
    thinking,
)
from gateway.output.tool_formats import Toolbox
from shared.errors import InvalidArgument
from shared.grammar import Grammar

# Llama's templates show the pythonic form with this name.
_PYTHONIC_EXAMPLE = "[func_name1("
_CALL_ID_CHARACTERS = string.ascii_letters + string.digits


class ToolCallParser(enum.Enum):
    """Model families by their format of tool calls."""

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
    """Model families by their format of reasoning."""

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
        special = {"kimi": KIMI_THINK, "mistral": MISTRAL_THINK, "seed-oss": SEED_THINK}
        return special.get(self.value, THINK)


TOOL_SYNONYMS: Mapping[str, str] = MappingProxyType(
    {
        **dict.fromkeys(("qwen", "qwen25"), "hermes"),
        "qwen3_coder": "qwen3-coder",
        **dict.fromkeys(("deepseekv3", "deepseek_v3"), "deepseek"),
        **dict.fromkeys(("deepseekv31", "deepseek_v31"), "deepseek-v3.1"),
        **dict.fromkeys(("gpt-oss", "openai"), "harmony"),
        "kimi_k2": "kimi-k2",
        "glm": "glm45",
        "llama3_json": "llama3",
        "llama4_pythonic": "pythonic",
        "minimax_m2": "minimax-m2",
        "seed_oss": "seed-oss",
    }
)
"""Our names of formats of calls, by SGLang's and vLLM's."""

REASONING_SYNONYMS: Mapping[str, str] = MappingProxyType(
    {
        **dict.fromkeys(("deepseek-v3", "deepseek_v3", "glm45", "minimax"), "qwen3"),
        **dict.fromkeys(("qwen3-thinking", "deepseek_r1"), "deepseek-r1"),
        **dict.fromkeys(("gpt-oss", "openai_gptoss"), "harmony"),
        "seed_oss": "seed-oss",
    }
)
"""Our names of formats of reasoning, by SGLang's and vLLM's."""


def _tool_parser(source: str) -> ToolCallParser:
    """Returns the family whose mark a template holds; Hermes where it holds `<tool_call>` alone."""
    families = (
        (CHANNEL, ToolCallParser.HARMONY),
        (tool_formats.MISTRAL_BEGIN, ToolCallParser.MISTRAL),
        (tool_formats.KIMI_CALLS, ToolCallParser.KIMI_K2),
        (MINIMAX.begin, ToolCallParser.MINIMAX_M2),
        (SEED_OSS.begin, ToolCallParser.SEED_OSS),
        (GLM.key, ToolCallParser.GLM45),
        (QWEN3_CODER.key, ToolCallParser.QWEN3_CODER),
        (_PYTHONIC_EXAMPLE, ToolCallParser.PYTHONIC),
    )
    for mark, family in families:
        if mark in source:
            return family
    if tool_formats.DEEPSEEK_CALLS in source:
        is_fenced = "```json" in source
        return ToolCallParser.DEEPSEEK if is_fenced else ToolCallParser.DEEPSEEK_V3_1
    is_llama = "<|start_header_id|>" in source or "<|header_start|>" in source
    if is_llama and tool_formats.HERMES_BEGIN not in source:
        return ToolCallParser.LLAMA3
    return ToolCallParser.HERMES


def _reasoning_parser(source: str) -> ReasoningParser:
    """Returns the reasoning format whose tags a template holds."""
    if CHANNEL in source:
        return ReasoningParser.HARMONY
    parsers = (ReasoningParser.KIMI, ReasoningParser.MISTRAL, ReasoningParser.SEED_OSS)
    for parser in (*parsers, ReasoningParser.QWEN3):
        if parser.tags.end in source:
            return parser
    return ReasoningParser.NONE


@dataclass(frozen=True, slots=True)
class OutputStyle:
    """The model's output format, with every `AUTO` resolved."""

    tools: ToolCallParser = ToolCallParser.NONE
    reasoning: ReasoningParser = ReasoningParser.NONE

    @classmethod
    def of(
        cls, template: str | None, tools: ToolCallParser, reasoning: ReasoningParser
    ) -> OutputStyle:
        """Resolves `AUTO` by the marks in the chat template."""
        source = template or ""
        if tools is ToolCallParser.AUTO:
            tools = _tool_parser(source) if template is not None else ToolCallParser.NONE
        if reasoning is ReasoningParser.AUTO:
            reasoning = _reasoning_parser(source)
        return cls(tools, reasoning)

    def check_tools(self) -> None:
        """Raises:
        InvalidArgument: the gateway parses no tool calls.
        """
        if self.tools is ToolCallParser.NONE:
            message = "tools is set; this gateway reads no calls (--tool-call-parser none)"
            raise InvalidArgument.of("TOOLS_OFF", "tools", message)

    def output(self, prompt: str, toolbox: Toolbox | None) -> ChatOutput | None:
        """Returns the formats in the answer to a prompt; None when the answer is all text."""
        is_harmony = self.reasoning is ReasoningParser.HARMONY
        if toolbox is None and self.reasoning is ReasoningParser.NONE:
            return None
        tags, before = self.reasoning.tags, prompt.rstrip()
        is_inside = self.reasoning is ReasoningParser.DEEPSEEK_R1 or before.endswith(tags.begin)
        if self.reasoning is ReasoningParser.NONE or before.endswith(tags.end):
            is_inside = False
        return ChatOutput(self, toolbox, is_inside and not is_harmony)


@dataclass(frozen=True, slots=True)
class ChatOutput:
    """The formats in one answer's output, for its parser and its grammar.

    Attributes:
        starts_inside: the output begins inside reasoning.
    """

    style: OutputStyle
    toolbox: Toolbox | None
    starts_inside: bool

    @property
    def has_reasoning(self) -> bool:
        return self.style.reasoning is not ReasoningParser.NONE

    @property
    def most_calls(self) -> float:
        """The most calls that the client takes."""
        return math.inf if self.toolbox is None or self.toolbox.is_parallel else 1

    @property
    def kept_marks(self) -> tuple[str, ...]:
        """Special tokens of the format, which must stay in the text for the parser."""
        kept: tuple[str, ...] = ()
        if self.toolbox is not None:
            kept += tool_formats.FAMILIES[self.style.tools.value].marks
        if self.style.reasoning is ReasoningParser.HARMONY:
            kept += HARMONY_MARKS
        tags = self.style.reasoning.tags
        return kept + ((tags.begin, tags.end) if self.has_reasoning else ())

    def format(self) -> Format:
        """Returns the format that parses one choice."""
        is_harmony = ToolCallParser.HARMONY is self.style.tools and self.toolbox is not None
        if is_harmony or self.style.reasoning is ReasoningParser.HARMONY:
            return harmony
        answer: Format = text_only
        call_marks: tuple[str, ...] = ()
        if self.toolbox is not None:
            family = tool_formats.FAMILIES[self.style.tools.value]
            answer = family.read({tool.name: tool.schema for tool in self.toolbox.tools})
            call_marks = (family.trigger,) if family.ends_reasoning else ()
        if not self.has_reasoning:
            return answer
        return thinking(
            answer,
            starts_inside=self.starts_inside,
            tags=self.style.reasoning.tags,
            call_marks=call_marks,
        )

    def grammar(self, requested: Grammar | None) -> Grammar | None:
        """Returns the grammar of the whole output: any reasoning, then the constrained answer.

        Args:
            requested: the grammar of the answer in the client's request.

        A required call replaces the requested grammar. Where the model is free to call, the answer
        either is a call or matches the requested grammar.

        Raises:
            InvalidArgument: calls cannot be combined with the requested grammar, or their schemas
                cannot be enforced.
        """
        is_harmony = self.style.reasoning is ReasoningParser.HARMONY
        is_harmony = is_harmony or self.style.tools is ToolCallParser.HARMONY
        calls = self._calls(requested is not None)
        answer = None
        if requested is not None and (self.toolbox is None or not self.toolbox.must_call):
            answer = call_grammar.format_of(requested)
            if answer is None:
                return self._without_tools(requested)
            if is_harmony:
                answer = sequence(text(f"{CHANNEL}final{MESSAGE}"), answer)
        formats = [content for content in (calls, answer) if content is not None]
        if not formats:
            return None
        if requested is not None and calls is None and not self.has_reasoning and not is_harmony:
            return requested
        content = formats[0] if len(formats) == 1 else any_of(formats)
        if is_harmony:
            content = call_grammar.after_analysis(content)
        elif self.has_reasoning:
            tags = self.style.reasoning.tags
            content = call_grammar.after_thinking(content, tags, starts_inside=self.starts_inside)
        return call_grammar.structural_tag(content)

    def _calls(self, is_constrained: bool) -> Tag | None:
        """Returns the format of calls; None where calls are not constrained, or without tools.

        Args:
            is_constrained: the request constrains the answer, so that a call must be, too.
        """
        if self.toolbox is None:
            return None
        family = self.style.tools.value
        if is_constrained or self.toolbox.must_call:
            return call_grammar.calls_format(family, self.toolbox)
        return call_grammar.strict_format(family, self.toolbox)

    def _without_tools(self, requested: Grammar) -> Grammar:
        """Returns a grammar that cannot be part of another grammar.

        Raises:
            InvalidArgument: there are tools, whose calls the grammar would silently forbid.
        """
        if self.toolbox is not None:
            message = f"tools cannot be combined with a constraint of kind {requested.kind.value}"
            raise InvalidArgument.of("CONSTRAINT_AMBIGUOUS", "tools", message)
        return requested

    @property
    def schemas_size(self) -> int:
        """Size of the tools' schemas, in bytes."""
        tools = () if self.toolbox is None else self.toolbox.tools
        return sum(len(orjson.dumps(tool.schema)) for tool in tools)

    def constrains_calls(self, *, is_constrained: bool) -> bool:
        """Returns whether a grammar may enforce schemas on calls.

        Args:
            is_constrained: the request constrains the answer.
        """
        tools = self.toolbox
        if tools is None:
            return False
        is_strict = any(tool.is_strict for tool in tools.tools)
        return is_constrained or is_strict or tools.must_call

    def new_call_id(self) -> str:
        """Returns a new id; Mistral's templates take exactly nine letters and digits."""
        characters = "".join(secrets.choice(_CALL_ID_CHARACTERS) for _ in range(24))
        is_short = self.style.tools is ToolCallParser.MISTRAL
        return characters[:9] if is_short else f"call_{characters}"
