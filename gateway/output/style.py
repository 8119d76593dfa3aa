"""The format in which the served model writes tool calls and reasoning: set by a flag, or read from
its chat template."""

from __future__ import annotations

import enum
import secrets
import string
from dataclasses import dataclass

import orjson

from gateway.notices import give_notice
from gateway.output import forced
from gateway.output import tool_formats as marks
from gateway.output.forced import Tag, any_of
from gateway.output.parser import Format
from gateway.output.reasoning import (
    CHANNEL,
    HARMONY_MARKS,
    KIMI_THINK,
    MISTRAL_THINK,
    SEED_THINK,
    THINK,
    ThinkTags,
    harmony,
    text_only,
    thinking,
)
from gateway.output.tagged_calls import GLM, MINIMAX, QWEN3_CODER, SEED_OSS
from gateway.output.tools import Toolbox
from shared.errors import InvalidArgument
from shared.grammar import Grammar

# Llama's templates show the form with these names.
_PYTHONIC_EXAMPLE = "[func_name1("
_CALL_ID_CHARACTERS = string.ascii_letters + string.digits


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


@dataclass(frozen=True, slots=True)
class OutputStyle:
    """The model's output format, with every `AUTO` resolved."""

    tools: ToolCallParser = ToolCallParser.NONE
    reasoning: ReasoningParser = ReasoningParser.NONE

    @classmethod
    def of(
        cls, template: str | None, tools: ToolCallParser, reasoning: ReasoningParser
    ) -> OutputStyle:
        """Resolves `AUTO` by the marks that the chat template writes itself."""
        source = template or ""
        if tools is ToolCallParser.AUTO:
            tools = tools_of(source) if template is not None else ToolCallParser.NONE
        if reasoning is ReasoningParser.AUTO:
            reasoning = reasoning_of(source)
        return cls(tools, reasoning)

    def check_tools(self) -> None:
        """Raises:
        InvalidArgument: the gateway does not know how the model calls.
        """
        if self.tools is ToolCallParser.NONE:
            message = "tools is set; this gateway reads no calls (--tool-call-parser none)"
            raise InvalidArgument.of("TOOLS_OFF", "tools", message)

    def output(self, prompt: str, toolbox: Toolbox | None) -> ChatOutput | None:
        """Returns how the answer to a prompt is read; None when all of it is text."""
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
    """The readers for the output of one answer.

    Attributes:
        starts_inside: it begins with reasoning.
    """

    style: OutputStyle
    toolbox: Toolbox | None
    starts_inside: bool

    @property
    def has_reasoning(self) -> bool:
        return self.style.reasoning is not ReasoningParser.NONE

    @property
    def kept_marks(self) -> tuple[str, ...]:
        """Special tokens that the format is made of, and that must not be left out of the text."""
        kept: tuple[str, ...] = ()
        if self.toolbox is not None:
            kept += marks.FAMILIES[self.style.tools.value].marks
        if self.style.reasoning is ReasoningParser.HARMONY:
            kept += HARMONY_MARKS
        tags = self.style.reasoning.tags
        return kept + ((tags.begin, tags.end) if self.has_reasoning else ())

    def format(self) -> Format:
        """Returns the format, for one choice."""
        if ToolCallParser.HARMONY is self.style.tools and self.toolbox is not None:
            return harmony
        if self.style.reasoning is ReasoningParser.HARMONY:
            return harmony
        answer: Format = text_only
        if self.toolbox is not None:
            schemas = {tool.name: tool.schema for tool in self.toolbox.tools}
            answer = marks.FAMILIES[self.style.tools.value].read(schemas)
        if not self.has_reasoning:
            return answer
        call_marks: tuple[str, ...] = ()
        if self.toolbox is not None:
            family = marks.FAMILIES[self.style.tools.value]
            call_marks = (family.trigger,) if family.ends_reasoning else ()
        return thinking(
            answer,
            starts_inside=self.starts_inside,
            tags=self.style.reasoning.tags,
            call_marks=call_marks,
        )

    def grammar(self, asked: Grammar | None) -> Grammar | None:
        """Returns what all of the output must match: reasoning is free, what follows is not.

        Args:
            asked: what the answer must match, if the client said.

        A required call goes before what is asked. Where the model is free to call, the answer is
        either a call or what is asked.

        Raises:
            InvalidArgument: calls cannot stand beside what is asked, or be held to their schemas.
        """
        is_harmony = self.style.reasoning is ReasoningParser.HARMONY
        is_harmony = is_harmony or self.style.tools is ToolCallParser.HARMONY
        calls = self._calls(asked is not None)
        answer = None
        if asked is not None and (self.toolbox is None or not self.toolbox.must_call):
            answer = forced.format_of(asked)
            if answer is None:
                return self._alone(asked)
            answer = forced.final_message(answer) if is_harmony else answer
        if asked is not None and answer is None:
            give_notice("a call is required, so the format of the answer has no effect")
        either = [part for part in (calls, answer) if part is not None]
        if not either:
            return None
        if asked is not None and calls is None and not self.has_reasoning and not is_harmony:
            return asked
        content = either[0] if len(either) == 1 else any_of(either)
        if is_harmony:
            content = forced.after_analysis(content)
        elif self.has_reasoning:
            tags = self.style.reasoning.tags
            content = forced.after_thinking(content, tags, starts_inside=self.starts_inside)
        return forced.structural_tag(content)

    def _calls(self, is_asked: bool) -> Tag | None:
        """Returns the format of calls; None where they are free, or there are no tools.

        Args:
            is_asked: the answer has a format unless it is a call.
        """
        if self.toolbox is None:
            return None
        family = self.style.tools.value
        if is_asked:
            return forced.calls_format(family, self.toolbox)
        return forced.tool_format(family, self.toolbox)

    def _alone(self, asked: Grammar) -> Grammar:
        """Returns a grammar that cannot be part of another.

        Raises:
            InvalidArgument: the model may call, which the grammar would forbid without a word.
        """
        if self.toolbox is not None:
            message = f"tools cannot be combined with a constraint of kind {asked.kind.value}"
            raise InvalidArgument.of("CONSTRAINT_AMBIGUOUS", "tools", message)
        return asked

    @property
    def schemas_size(self) -> int:
        """Bytes of the schemas of the tools."""
        tools = () if self.toolbox is None else self.toolbox.tools
        return sum(len(orjson.dumps(tool.schema)) for tool in tools)

    def holds_calls(self, *, is_asked: bool) -> bool:
        """Whether a grammar may hold calls to their schemas.

        Args:
            is_asked: the answer has a format unless it is a call.
        """
        tools = self.toolbox
        if tools is None:
            return False
        is_strict = any(tool.is_strict for tool in tools.tools)
        return is_asked or is_strict or tools.must_call

    def new_call_id(self) -> str:
        """Returns an id; Mistral's templates take nine letters and digits, no more."""
        characters = "".join(secrets.choice(_CALL_ID_CHARACTERS) for _ in range(24))
        is_short = self.style.tools is ToolCallParser.MISTRAL
        return characters[:9] if is_short else f"call_{characters}"
