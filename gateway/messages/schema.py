"""The JSON bodies of Anthropic's messages interface."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from gateway.schema import Body, ContentPart, Flag, Speculation


class Message(Body):
    """One turn. A block that is no text is refused where it is used."""

    role: Literal["user", "assistant", "system"]
    content: str | list[ContentPart]


class Prompt(Body):
    """Fields that counting shares with generating: body of `/v1/messages/count_tokens`."""

    model: str
    messages: list[Message]
    system: str | list[ContentPart] | None = None


class MessagesRequest(Prompt):
    """Body of `/v1/messages`."""

    max_tokens: int
    stream: Flag = False
    stop_sequences: list[str] | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    seed: int | None = Field(default=None, description="not Anthropic's: makes the answer exact")
    speculation: Speculation | None = None
