"""The JSON body of OpenAI's responses interface."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from gateway.schema import Body, ContentPart, Flag, Items, SharedFields, Speculation


class InputItem(Body):
    """One item of `input`; which fields count depends on its type."""

    type: str = Field(
        default="message",
        description="message, function_call, function_call_output, reasoning, compaction or "
        "item_reference",
    )
    id: str | None = Field(default=None, description="alone, or of an item_reference: a kept item")
    role: str | None = None
    content: str | Items[ContentPart] | None = None
    call_id: str | None = None
    name: str | None = None
    namespace: str | None = None
    arguments: str | None = None
    output: str | Items[ContentPart] | None = None
    encrypted_content: str | None = Field(
        default=None, description="of a compaction: what `/v1/responses/compact` made of a history"
    )

    @property
    def is_reference(self) -> bool:
        return self.type == "item_reference" or self.model_fields_set == {"id"}


class Tool(Body):
    """A tool the model may use: a function."""

    type: str = Field(description="function, or namespace; tools that others host are left out")
    name: str | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: Flag = False
    tools: Items[Tool] | None = Field(default=None, description="of a namespace")


class NamedFunction(Body):
    """A function that must be called."""

    type: Literal["function"]
    name: str


class AllowedFunctions(Body):
    """Only some of the functions may be called."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"] = "auto"
    tools: Items[NamedFunction]


class Reasoning(Body):
    """The reasoning effort, passed to the chat template."""

    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    summary: str | None = Field(default=None, description="no effect: thoughts come whole")


class TextFormat(Body):
    """The format of the text."""

    type: str = "text"
    name: str | None = None
    content: dict[str, Any] | bool | None = Field(default=None, alias="schema")
    strict: bool | None = None
    description: str | None = None


class TextConfig(Body):
    """Options of the text output."""

    format: TextFormat | None = None
    verbosity: str | None = Field(default=None, description="handed to the chat template")


class ConversationId(Body):
    """A conversation that is kept."""

    id: str


class ResponsesRequest(SharedFields):
    """Body of `/v1/responses`."""

    model: str | None = None
    input: str | Items[InputItem] | None = None
    previous_response_id: str | None = Field(
        default=None, description="a kept response, whose input and output come first"
    )
    conversation: str | ConversationId | None = Field(
        default=None, description="a kept conversation, which comes first and grows"
    )
    store: bool | None = Field(
        default=None, description="whether the response is kept; true where there is a store"
    )
    background: Flag = Field(default=False, description="answer at once; ask for the result later")
    instructions: str | None = None
    stream: Flag = False
    # The answer repeats what was asked, and JSON's writer knows 64 bits.
    max_output_tokens: int | None = Field(default=None, le=2**31 - 1)
    top_logprobs: int | None = None
    include: Items[str] | None = None
    reasoning: Reasoning | None = None
    text: TextConfig | None = None
    tools: Items[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedFunction | AllowedFunctions | None = (
        None
    )
    parallel_tool_calls: bool | None = Field(default=None, description="true by default")
    metadata: dict[str, str] | None = None
    # Without effect; the answer repeats them.
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    service_tier: str | None = Field(default=None, description="one tier serves all: `default`")
    speculation: Speculation | None = None

    @property
    def conversation_id(self) -> str | None:
        given = self.conversation
        return given.id if isinstance(given, ConversationId) else given


class ConversationRequest(Body):
    """Body of `/v1/conversations`, new or changed."""

    items: Items[InputItem] | None = None
    metadata: dict[str, str] | None = None


class ConversationItems(Body):
    """Items that a conversation gets."""

    items: Items[InputItem]
