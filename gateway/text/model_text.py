"""Everything the gateway reads from a model folder."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from gateway.text.chat_template import ChatTemplate
from gateway.text.defaults import SamplingDefaults
from gateway.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class ModelText:
    """The text side of one model.

    Attributes:
        template: None when the model has none; it then serves completions only.
    """

    tokenizer: Tokenizer
    template: ChatTemplate | None
    defaults: SamplingDefaults

    @classmethod
    def read(cls, folder: Path) -> ModelText:
        """Raises:
        CheckpointError: a file is missing or malformed; names it.
        """
        return cls(Tokenizer.read(folder), ChatTemplate.read(folder), SamplingDefaults.read(folder))
