"""The JSON bodies clients send, as far as the gateway reads them.

Null means "not given" everywhere, as in OpenAI's interface. Unknown fields are kept aside so that
they can be named in the log. Ranges are checked where a field is used, with OpenAI's field name.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field


def _null_is_absent(value: object) -> object:
    return False if value is None else value


Flag = Annotated[bool, BeforeValidator(_null_is_absent)]


class Body(BaseModel):
    """A JSON object that may hold fields nobody here knows."""

    model_config = ConfigDict(extra="allow", protected_namespaces=())

    @property
    def unknown_fields(self) -> dict[str, Any]:
        return self.model_extra or {}


class StreamOptions(Body):
    """What a stream carries beside text."""

    include_usage: Flag = False
    continuous_usage_stats: Flag = Field(default=False, description="usage so far on every chunk")


class Speculation(Body):
    """Speculation settings of one request. They change speed, never the output."""

    disable: Flag = Field(default=False, description="decode without draft tokens")


class GenerationBody(Body):
    """Fields that `/v1/completions` and `/v1/chat/completions` share."""

    model: str | None = None
    stream: Flag = False
    stream_options: StreamOptions | None = None
    n: int | None = Field(default=None, description="choices for each prompt; 1 by default")
    seed: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = Field(default=None, description="0 or -1 is off")
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[int, float] | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: Flag = False
    ignore_eos: Flag = False
    skip_special_tokens: bool | None = None
    return_token_ids: Flag = False
    speculation: Speculation | None = None

    @property
    def stop_strings(self) -> tuple[str, ...]:
        if self.stop is None:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)


class CompletionRequest(GenerationBody):
    """Body of `/v1/completions`."""

    prompt: str | list[str] | list[int] | list[list[int]]
    best_of: int | None = None
    echo: Flag = False
    logprobs: int | None = None
    add_special_tokens: bool | None = None


class ContentPart(Body):
    """Part of a message; the gateway reads text only."""

    type: str
    text: str | None = None


class ChatMessage(Body):
    """One message of a chat."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | list[ContentPart] | None = None
    name: str | None = None


class ChatCompletionRequest(GenerationBody):
    """Body of `/v1/chat/completions`."""

    messages: list[ChatMessage]
    max_completion_tokens: int | None = None
    logprobs: Flag = False
    top_logprobs: int | None = None
    reasoning_effort: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
