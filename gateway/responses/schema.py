"""The JSON bodies and answers of OpenAI's responses interface."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, NonNegativeInt

from gateway.openapi import Answered, AnswerMetrics, SchemaCheck, Timings, TokenLogprob
from gateway.schema import Body, ContentPart, Flag, Items, ServiceTier, SharedFields, Speculation

Status = Literal["completed", "incomplete"]
"""Status of an output item."""


class InputItem(Body):
    """One item of `input`; which fields count depends on its type."""

    type: str = Field(
        default="message",
        description="message, function_call, function_call_output, reasoning, compaction or "
        "item_reference",
    )
    id: str | None = Field(
        default=None, description="alone, or in an item_reference: names a stored item"
    )
    role: str | None = None
    content: str | Items[ContentPart] | None = None
    call_id: str | None = None
    name: str | None = None
    namespace: str | None = None
    arguments: str | None = None
    output: str | Items[ContentPart] | None = None
    encrypted_content: str | None = Field(
        default=None, description="of a compaction: the summary that `/v1/responses/compact` made"
    )

    @property
    def is_reference(self) -> bool:
        return self.type == "item_reference" or self.model_fields_set == {"id"}


class Tool(Body):
    """A tool the model may use: a function."""

    type: str = Field(description="function, or namespace; hosted tools are left out")
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
    """The functions that may be called."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"] = "auto"
    tools: Items[NamedFunction]


class Reasoning(Body):
    """The reasoning effort, passed to the chat template."""

    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    summary: str | None = Field(default=None, description="no effect: reasoning is returned whole")


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
    """A stored conversation."""

    id: str


class ResponsesRequest(SharedFields):
    """Body of `/v1/responses`."""

    model: str | None = None
    input: str | Items[InputItem] | None = None
    previous_response_id: str | None = Field(
        default=None, description="a stored response, whose input and output come first"
    )
    conversation: str | ConversationId | None = Field(
        default=None,
        description="a stored conversation: it comes first, and gets the new input and output",
    )
    store: bool | None = Field(
        default=None, description="whether to store the response; true by default with a store"
    )
    background: Flag = Field(default=False, description="answer at once; ask for the result later")
    instructions: str | None = None
    stream: Flag = False
    # The answer repeats the number, and the JSON writer takes at most 64 bits.
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
    chat_template_kwargs: dict[str, Any] | None = None
    metadata: dict[str, str] | None = None
    # Without effect; the answer repeats them.
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    service_tier: ServiceTier | None = Field(
        default=None, description="every request is served by the tier `default`"
    )
    speculation: Speculation | None = None

    @property
    def conversation_id(self) -> str | None:
        given = self.conversation
        return given.id if isinstance(given, ConversationId) else given


class NewMetadata(Body):
    """Body that changes the metadata of a stored chat or conversation."""

    metadata: dict[str, str] | None = None


class ConversationRequest(NewMetadata):
    """Body of `/v1/conversations`."""

    items: Items[InputItem] | None = None


class ConversationItems(Body):
    """Body that adds items to a conversation."""

    items: Items[InputItem]


class OutputText(Answered):
    """Text of a message."""

    type: Literal["output_text"]
    text: str
    annotations: list[Any] = Field(description="always empty")
    logprobs: list[TokenLogprob]


class OutputMessage(Answered):
    """A message of the assistant."""

    id: str
    type: Literal["message"]
    status: Status
    role: Literal["assistant"]
    content: list[OutputText]


class ReasoningText(Answered):
    """Text of the reasoning."""

    type: Literal["reasoning_text"]
    text: str


class OutputReasoning(Answered):
    """The model's reasoning before its answer."""

    id: str
    type: Literal["reasoning"]
    status: Status
    summary: list[Any] = Field(description="always empty")
    content: list[ReasoningText]


class OutputCall(Answered):
    """A call of a function."""

    id: str
    type: Literal["function_call"]
    call_id: str = Field(description="names the call in its `function_call_output`")
    name: str
    arguments: str = Field(description="a JSON object, as text")
    status: Status


class IncompleteDetails(Answered):
    """The reason why a response is incomplete."""

    reason: Literal["max_output_tokens"]


class ReasoningSettings(Answered):
    """The request's reasoning settings, repeated."""

    effort: str | None
    summary: str | None


class TextSettings(Answered):
    """The request's text settings, repeated."""

    format: dict[str, Any]


class InputTokensDetails(Answered):
    """The parts of `input_tokens`."""

    cached_tokens: NonNegativeInt
    cache_write_tokens: NonNegativeInt


class OutputTokensDetails(Answered):
    """The parts of `output_tokens`; prediction tokens are tokens proposed by drafts."""

    reasoning_tokens: NonNegativeInt
    accepted_prediction_tokens: NonNegativeInt
    rejected_prediction_tokens: NonNegativeInt


class ResponseTokens(Answered):
    """Tokens of a response."""

    input_tokens: NonNegativeInt
    input_tokens_details: InputTokensDetails
    output_tokens: NonNegativeInt
    output_tokens_details: OutputTokensDetails
    total_tokens: NonNegativeInt


class ResponseConversation(Answered):
    """The conversation that the response continues."""

    id: str


class ResponseAnswer(Answered):
    """Answer of `/v1/responses`."""

    id: str
    object: Literal["response"]
    created_at: float = Field(description="seconds since 1970")
    completed_at: float | None = Field(description="once it has ended")
    status: Literal["queued", "completed", "incomplete"]
    background: bool
    error: None
    incomplete_details: IncompleteDetails | None
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, Any]
    model: str
    output: list[OutputMessage | OutputReasoning | OutputCall]
    parallel_tool_calls: bool
    previous_response_id: str | None
    prompt_cache_key: str | None
    safety_identifier: str | None
    service_tier: Literal["default"] | None = Field(description="null unless the request set it")
    system_fingerprint: str
    user: str | None
    conversation: ResponseConversation | None
    reasoning: ReasoningSettings
    store: bool
    temperature: float
    text: TextSettings
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_logprobs: int
    top_p: float
    truncation: Literal["disabled"]
    usage: ResponseTokens | None = Field(description="null before it has ended")
    metrics: AnswerMetrics | None
    timings: Timings | None = Field(description="null before it has ended")
    schema_check: SchemaCheck | None = Field(
        default=None, description="of the parts of a schema that no grammar enforces"
    )
