"""The JSON body of OpenAI's responses interface."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from gateway.schema import Body, ContentPart, Flag, Speculation


class InputItem(Body):
    """One item of `input`; the gateway reads messages."""

    type: str = "message"
    role: str | None = None
    content: str | list[ContentPart] | None = None


class Reasoning(Body):
    """How much to reason; handed to the chat template."""

    effort: str | None = None


class ResponsesRequest(Body):
    """Body of `/v1/responses`."""

    model: str | None = None
    input: str | list[InputItem]
    instructions: str | None = None
    stream: Flag = False
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_logprobs: int | None = None
    include: list[str] | None = None
    reasoning: Reasoning | None = None
    metadata: dict[str, Any] | None = None
    seed: int | None = Field(default=None, description="not OpenAI's: makes the answer exact")
    speculation: Speculation | None = None
