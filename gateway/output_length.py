"""The largest number of tokens of an answer, within the context that the prompt leaves."""

from __future__ import annotations

from dataclasses import dataclass

from gateway.generation import TargetModel
from gateway.notices import give_notice
from shared.errors import InvalidArgument


@dataclass(frozen=True, slots=True)
class OutputLength:
    """The limits on the output's length in a request.

    Attributes:
        max_tokens: None is all that the context leaves.
        field: that named it; None is a default, which is cut in silence.
        is_capped: more than the context leaves is cut with a notice, as clients of the interface
            rely on; else it is refused, as vLLM and SGLang do.
    """

    max_tokens: int | None
    field: str | None = None
    is_capped: bool = False

    def check(self, num_prompt_tokens: int, model: TargetModel) -> None:
        """Raises:
        InvalidArgument: the context does not hold prompt and output.
        """
        limit, max_tokens, field = model.max_context_tokens, self.max_tokens, self.field
        num_left = limit - num_prompt_tokens
        if field is None or max_tokens is None or not 0 < num_left < max_tokens:
            return
        # Client libraries look for the words "maximum context length is".
        message = (
            f"{field} is {max_tokens:,}; it must be at most {num_left:,}, because this model's "
            f"maximum context length is {limit:,} tokens and the prompt has {num_prompt_tokens:,}"
        )
        if not self.is_capped:
            raise InvalidArgument.of("OUTPUT_TOO_LONG", field, message)
        give_notice(f"{field} is {max_tokens:,}; the context leaves {num_left:,}")
