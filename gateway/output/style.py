"""How the served model writes calls and reasoning: chosen by a flag, or read off its template."""

from __future__ import annotations

import enum
import secrets
import string
from dataclasses import dataclass

from gateway.output import forced
from gateway.output import tool_formats as marks
from gateway.output.harmony import CHANNEL, MESSAGE, START, harmony
from gateway.output.parts import Format
from gateway.output.reasoning import THINK, THINK_END, text_only, thinking
from gateway.output.tools import Toolbox
from shared.errors import InvalidArgument
from shared.grammar import Grammar

_CALL_ID_CHARACTERS = string.ascii_letters + string.digits
_HARMONY_MARKS = (START, CHANNEL, MESSAGE, "<|end|>", "<|call|>", "<|return|>", "<|constrain|>")
_DEEPSEEK_MARKS = (
    *(marks.DEEPSEEK_CALLS, marks.DEEPSEEK_CALLS_END, marks.DEEPSEEK_SEP),
    *(marks.DEEPSEEK_CALL, marks.DEEPSEEK_CALL_END),
)
_MARKS = {
    "hermes": (marks.HERMES_BEGIN, marks.HERMES_END),
    "llama3": (marks.PYTHON_TAG,),
    "mistral": (marks.MISTRAL_BEGIN, marks.MISTRAL_ARGS, marks.MISTRAL_ID),
    "deepseek": _DEEPSEEK_MARKS,
    "deepseek-v3.1": _DEEPSEEK_MARKS,
    "harmony": _HARMONY_MARKS,
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


class ReasoningParser(enum.Enum):
    """Ways to tell reasoning from the answer."""

    AUTO = "auto"
    NONE = "none"
    QWEN3 = "qwen3"
    DEEPSEEK_R1 = "deepseek-r1"
    HARMONY = "harmony"


@dataclass(frozen=True, slots=True)
class OutputStyle:
    """What is known of the model's way to write, with every `AUTO` resolved."""

    tools: ToolCallParser = ToolCallParser.NONE
    reasoning: ReasoningParser = ReasoningParser.NONE

    @classmethod
    def of(
        cls, template: str | None, tools: ToolCallParser, reasoning: ReasoningParser
    ) -> OutputStyle:
        """Resolves `AUTO` by the marks that the chat template writes itself."""
        source = template or ""
        if tools is ToolCallParser.AUTO:
            tools = _tools_of(source) if template is not None else ToolCallParser.NONE
        if reasoning is ReasoningParser.AUTO:
            reasoning = _reasoning_of(source)
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
        is_inside = self.reasoning is ReasoningParser.DEEPSEEK_R1 or (
            self.reasoning is ReasoningParser.QWEN3 and prompt.rstrip().endswith(THINK)
        )
        if prompt.rstrip().endswith(THINK_END):
            is_inside = False
        return ChatOutput(self, toolbox, is_inside and not is_harmony)


@dataclass(frozen=True, slots=True)
class ChatOutput:
    """How one answer is read.

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
            kept += _MARKS.get(self.style.tools.value, ())
        if self.style.reasoning is ReasoningParser.HARMONY:
            kept += _HARMONY_MARKS
        return kept + ((THINK, THINK_END) if self.has_reasoning else ())

    def format(self) -> Format:
        """Returns the format, for one choice."""
        if ToolCallParser.HARMONY is self.style.tools and self.toolbox is not None:
            return harmony
        if self.style.reasoning is ReasoningParser.HARMONY:
            return harmony
        answer: Format = text_only
        if self.toolbox is not None:
            answer = marks.tool_format(self.style.tools.value, self.toolbox.names)
        if not self.has_reasoning:
            return answer
        return thinking(answer, starts_inside=self.starts_inside)

    def grammar(self, asked: Grammar | None) -> Grammar | None:
        """Returns what all of the output must match: reasoning is free, what follows is not.

        Args:
            asked: what the answer must match, if the client said.

        Raises:
            InvalidArgument: calls are required of an answer that has a grammar.
        """
        family = self.style.tools.value
        tools = None if self.toolbox is None else forced.tool_format(family, self.toolbox)
        if tools is not None and asked is not None:
            message = "tool_choice is set beside a grammar; only one may say what the answer is"
            raise InvalidArgument.of("CONSTRAINT_AMBIGUOUS", "tool_choice", message)
        if asked is not None:
            content = forced.format_of(asked)
            if not self.has_reasoning or content is None:
                return asked
        elif tools is not None:
            content = tools
        else:
            return None
        if self.style.reasoning is ReasoningParser.HARMONY or family == "harmony":
            content = forced.after_analysis(content, is_call=tools is not None)
        elif self.has_reasoning:
            content = forced.after_thinking(content, starts_inside=self.starts_inside)
        return forced.structural_tag(content)

    def new_call_id(self) -> str:
        """Returns an id; Mistral's templates take nine letters and digits, no more."""
        characters = "".join(secrets.choice(_CALL_ID_CHARACTERS) for _ in range(24))
        is_short = self.style.tools is ToolCallParser.MISTRAL
        return characters[:9] if is_short else f"call_{characters}"


def _tools_of(source: str) -> ToolCallParser:
    if CHANNEL in source:
        return ToolCallParser.HARMONY
    if marks.MISTRAL_BEGIN in source:
        return ToolCallParser.MISTRAL
    if marks.DEEPSEEK_CALLS in source:
        is_fenced = "```json" in source
        return ToolCallParser.DEEPSEEK if is_fenced else ToolCallParser.DEEPSEEK_V3_1
    if "<|start_header_id|>" in source and marks.HERMES_BEGIN not in source:
        return ToolCallParser.LLAMA3
    return ToolCallParser.HERMES


def _reasoning_of(source: str) -> ReasoningParser:
    if CHANNEL in source:
        return ReasoningParser.HARMONY
    return ReasoningParser.QWEN3 if THINK_END in source else ReasoningParser.NONE
