"""Everything the gateway reads from a model folder."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gateway.output.families import ReasoningParser, ToolCallParser
from gateway.output.style import OutputStyle
from gateway.text.chat_template import ChatTemplate, read_json
from shared.sampling_defaults import SamplingDefaults
from shared.text.tokenizer import MAX_PROMPT_CHARACTERS, Tokenizer


@dataclass(frozen=True, slots=True)
class ModelText:
    """The text side of one model.

    Attributes:
        style: how it writes calls of tools and reasoning.
        template: None when the model has none; it then serves completions only.
        tokenizer_config: what the model's file of that name says.
    """

    tokenizer: Tokenizer
    template: ChatTemplate | None
    defaults: SamplingDefaults
    style: OutputStyle
    tokenizer_config: Mapping[str, Any] = field(default_factory=dict)

    @property
    def thinking_marks(self) -> tuple[int, int] | None:
        """The tokens before and behind reasoning; None where they are not one each."""
        tags, encode = self.style.reasoning.tags, self.tokenizer.encode_word
        start, end = encode(tags.begin), encode(tags.end)
        parts = ReasoningParser.NONE, ReasoningParser.HARMONY  # which have other marks
        if self.style.reasoning in parts or len(start) != 1 or len(end) != 1:
            return None
        return start[0], end[0]

    @classmethod
    def read(
        cls,
        folder: Path,
        max_prompt_characters: int = MAX_PROMPT_CHARACTERS,
        *,
        tools: ToolCallParser = ToolCallParser.AUTO,
        reasoning: ReasoningParser = ReasoningParser.AUTO,
    ) -> ModelText:
        """Raises:
        CheckpointError: a file is missing or malformed; names it.
        """
        tokenizer = Tokenizer.read(folder, max_prompt_characters)
        template = ChatTemplate.read(folder)
        style = OutputStyle.of(None if template is None else template.source, tools, reasoning)
        config = read_json(folder / "tokenizer_config.json")
        return cls(tokenizer, template, SamplingDefaults.read(folder), style, config)
