"""The JSON bodies of requests: the fields that the gateway reads.

Null means "not given" everywhere, as in OpenAI's interface. Unknown fields are kept apart so that a
notice can name them. Ranges are checked where a field is used, with OpenAI's field name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, Self, TypeVar, cast

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    model_validator,
)
from pydantic_core import CoreSchema

from gateway.failures import give_notice
from shared.errors import InvalidArgument


def _null_is_absent(value: object) -> object:
    return False if value is None else value


class _FirstErrorOnly:
    """Pydantic's `FailFast`, which cannot be part of a generic alias."""

    def __get_pydantic_core_schema__(
        self, source: Any, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        return cast("CoreSchema", {**handler(source), "fail_fast": True})


def _bounded(value: object) -> object:
    if isinstance(value, dict) and len(value) > MAX_BIASED_TOKENS:
        raise ValueError(f"it has {len(value):,} entries; at most {MAX_BIASED_TOKENS:,} are taken")
    return value


Flag = Annotated[bool, BeforeValidator(_null_is_absent)]
T = TypeVar("T")
Items = Annotated[list[T], _FirstErrorOnly()]
"""A list that is refused at its first wrong item: a million errors cost gigabytes."""
ServiceTier = Literal["auto", "default", "flex", "scale", "priority"]
"""OpenAI's tiers; all are served alike."""
MAX_BIASED_TOKENS = 65_536
Bias = Annotated[dict[int, float], BeforeValidator(_bounded)]


class Body(BaseModel):
    """A JSON object that may hold unknown fields: they are its `model_extra`."""

    model_config = ConfigDict(extra="allow", protected_namespaces=())


class StreamOptions(Body):
    """Options for the extra fields of a stream."""

    include_usage: Flag = False
    continuous_usage_stats: Flag = Field(
        default=False, description="usage so far on every chunk; needs `include_usage`"
    )

    @property
    def is_continuous(self) -> bool:
        return self.include_usage and self.continuous_usage_stats


class Speculation(Body):
    """Speculation settings of one request. They change speed, never the output."""

    disable: Flag = Field(default=False, description="decode without draft tokens")
    algorithm: str | None = Field(
        default=None, description="only drafts of this algorithm; any when absent"
    )
    num_steps: int | None = Field(
        default=None, description="depth of draft trees; by default the depth that pays best"
    )
    num_draft_tokens: int | None = Field(
        default=None,
        description="most rows of a draft tree to verify, root included; "
        "by default the number that pays best",
    )
    outcome_budget: int | None = Field(
        default=None,
        description="most verdicts that a draft prepares for in advance; 0 drafts after a verdict",
    )
    trace: Flag = Field(default=False, description="report every round, token by token")


class JsonSchemaFormat(Body):
    """The schema of a `response_format`; its name, description and strictness have no effect."""

    name: str | None = None
    content: dict[str, Any] | bool | None = Field(default=None, alias="schema")
    strict: bool | None = Field(default=None, description="output always keeps to the schema")


class ResponseFormat(Body):
    """The format of the output. The fields of a `structural_tag` are given next to its type."""

    type: str = Field(description="text, json_object, json_schema or structural_tag")
    json_schema: JsonSchemaFormat | None = None
    content: dict[str, Any] | bool | None = Field(
        default=None, alias="schema", description="schema of a json_object, as in llama.cpp"
    )


class StructuredOutputs(Body):
    """vLLM's constraints on the output; only one of the fields may be set."""

    content: dict[str, Any] | str | None = Field(
        default=None, alias="json", description="a JSON schema"
    )
    regex: str | None = None
    choice: Items[str] | None = None
    grammar: str | None = Field(default=None, description="GBNF, EBNF or Lark")
    json_object: Flag = False
    structural_tag: dict[str, Any] | str | None = None


class SamplingFields(Body):
    """Sampling parameters and stop conditions, the same in every interface."""

    seed: int | None = Field(default=None, description="makes the answer exact")
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = Field(default=None, description="0 or -1 is off")
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: Bias | None = None
    allowed_token_ids: Items[int] | None = Field(
        default=None, description="no other token is drawn"
    )
    bad_words: Items[str] | None = Field(default=None, description="words the answer never holds")
    thinking_token_budget: int | None = Field(
        default=None, ge=0, description="tokens of reasoning, after which the answer begins"
    )
    min_tokens: int | None = None
    stop: str | Items[str] | None = None
    stop_regex: str | Items[str] | None = Field(
        default=None, description="patterns that end the answer where they match"
    )
    stop_token_ids: Items[int] | None = None
    include_stop_str_in_output: Flag = False
    no_stop_trim: Flag = Field(
        default=False, description="SGLang's name of `include_stop_str_in_output`"
    )
    ignore_eos: Flag = False
    skip_special_tokens: bool | None = None

    @property
    def keeps_stop(self) -> bool:
        return self.include_stop_str_in_output or self.no_stop_trim


class ContentPart(Body):
    """Part of a message; the gateway reads text only."""

    type: str
    text: str | None = None


class Prediction(Body):
    """Text whose long runs the answer is likely to repeat; they are then generated faster."""

    type: Literal["content"] = "content"
    content: str | Items[ContentPart]

    @property
    def text(self) -> str:
        if isinstance(self.content, str):
            return self.content
        return "".join(part.text or "" for part in self.content)


class ServingFields(Body):
    """Fields about how a request is served, the same in every interface."""

    priority: int | None = Field(
        default=None, description="order of waiting requests: the lowest first; 0 by default"
    )
    truncate_prompt_tokens: int | None = Field(
        default=None, description="keeps this many tokens of the prompt's end; -1: all that fit"
    )
    truncation_side: Literal["left", "right"] | None = Field(
        default=None, description="the side that `truncate_prompt_tokens` cuts; left by default"
    )
    cache_salt: str | None = Field(
        default=None, description="shares cached prefixes with requests of the same salt only"
    )
    extra_key: str | None = Field(default=None, description="SGLang's name of `cache_salt`")
    prediction: Prediction | None = None

    @property
    def salt(self) -> str | None:
        """`cache_salt` and `extra_key` as one; SGLang joins them, too."""
        return (self.cache_salt or "") + self.extra_key if self.extra_key else self.cache_salt


class SharedFields(SamplingFields, ServingFields):
    """Fields of every interface's body except that of `/generate`."""

    @property
    def shared_fields(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in SharedFields.model_fields}


class GenerationBody(SharedFields):
    """Fields that `/v1/completions` and `/v1/chat/completions` share."""

    model: str | None = None
    stream: Flag = False
    stream_options: StreamOptions | None = None
    service_tier: ServiceTier | None = Field(
        default=None, description="one tier serves all: `default`"
    )
    n: int | None = Field(default=None, description="choices for each prompt; 1 by default")
    max_tokens: int | None = None
    return_token_ids: Flag = False
    return_tokens_as_token_ids: Flag = Field(
        default=False, description="log probabilities name tokens as `token_id:ID`"
    )
    logprob_token_ids: Items[int] | None = Field(
        default=None, description="tokens whose log probabilities replace those of the likeliest"
    )
    prompt_logprobs: int | None = Field(
        default=None, description="log probabilities of prompt tokens and of this many likeliest"
    )
    rid: str | None = Field(
        default=None, max_length=128, description="the answer's `id`, for /abort_request"
    )
    speculation: Speculation | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: Items[str] | None = None
    guided_grammar: str | None = None
    regex: str | None = None
    ebnf: str | None = Field(default=None, description="GBNF, EBNF or Lark")
    grammar: str | None = Field(default=None, description="llama.cpp's name of `ebnf`")
    json_schema: dict[str, Any] | str | None = None
    structural_tag: dict[str, Any] | str | None = None

    @property
    def num_shown(self) -> int:
        """Choices shown for each prompt."""
        return 1 if self.n is None else self.n


class CompletionRequest(GenerationBody):
    """Body of `/v1/completions`."""

    prompt: str | Items[str] | Items[int] | Items[Items[int]]
    best_of: int | None = Field(
        default=None, description="choices drawn, of which the `n` likeliest are the answer"
    )
    echo: Flag = False
    logprobs: int | None = None
    add_special_tokens: bool | None = None


class CalledFunction(Body):
    """The function of a tool call, with its arguments."""

    name: str
    arguments: str | dict[str, Any] = Field(default="{}", description="a JSON object, as text")


class ToolCall(Body):
    """A call that the assistant made."""

    id: str | None = None
    type: Literal["function"] = "function"
    function: CalledFunction


class ChatMessage(Body):
    """One message of a chat."""

    role: str = Field(
        description="system, developer, user, assistant, tool, or another that the model's chat "
        "template knows"
    )
    content: str | Items[ContentPart] | None = None
    name: str | None = None
    tool_calls: Items[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = Field(default=None, description="newer name of `reasoning_content`")


class FunctionDefinition(Body):
    """A function the model may call."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = Field(default=None, description="a JSON schema")
    strict: Flag = Field(default=False, description="arguments keep to the schema")


class ToolDefinition(Body):
    """A tool the model may use. As in responses, the function's fields may be next to the type."""

    type: Literal["function"]
    function: FunctionDefinition

    @model_validator(mode="before")
    @classmethod
    def _nested(cls, given: Any) -> Any:
        if isinstance(given, dict) and "name" in given and "function" not in given:
            function = {name: value for name, value in given.items() if name != "type"}
            return {"type": given.get("type"), "function": function}
        return given


class FunctionName(Body):
    """Names a function."""

    name: str


class NamedTool(Body):
    """A tool that must be called."""

    type: Literal["function"]
    function: FunctionName

    @classmethod
    def of(cls, name: str) -> Self:
        return cls(type="function", function=FunctionName(name=name))


class AllowedTools(Body):
    """Some of the tools, and whether one of them must be called."""

    mode: Literal["auto", "required"] = "auto"
    tools: Items[NamedTool]


class AllowedToolChoice(Body):
    """Only some of the tools may be called."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


class Thinking(Body):
    """Whether the model thinks before it answers."""

    type: Literal["enabled", "adaptive", "disabled"]
    budget_tokens: int | None = Field(default=None, ge=0)


class ChatCompletionRequest(GenerationBody):
    """Body of `/v1/chat/completions`."""

    messages: Items[ChatMessage]
    max_completion_tokens: int | None = None
    logprobs: Flag = False
    top_logprobs: int | None = None
    tools: Items[ToolDefinition] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | AllowedToolChoice | None = None
    parallel_tool_calls: bool | None = Field(default=None, description="true by default")
    reasoning_effort: str | None = None
    include_reasoning: bool | None = Field(default=None, description="true by default")
    chat_template: str | None = Field(
        default=None, description="in place of the model's, where the gateway allows it"
    )
    chat_template_kwargs: dict[str, Any] | None = None
    thinking: Thinking | None = Field(default=None, description="handed to the chat template")
    enable_thinking: bool | None = Field(default=None, description="handed to the chat template")
    add_generation_prompt: bool | None = None
    continue_final_message: Flag = Field(
        default=False, description="the answer continues the last message"
    )
    input_ids: Items[int] | None = Field(
        default=None, description="the prompt as token ids, in place of the rendered messages"
    )
    separate_reasoning: bool | None = Field(default=None, description="true by default")
    verbosity: str | None = Field(default=None, description="handed to the chat template")
    echo: Flag = Field(
        default=False, description="the answer begins with the last message, if it is continued"
    )
    store: Flag = Field(default=False, description="keep the chat, where there is a store")
    metadata: dict[str, str] | None = Field(default=None, description="kept with the chat")


# Fields that would change the answer and are not implemented: refused by name, never ignored.

_MAX_NAMED = 8  # unknown fields that a notice names


@dataclass(frozen=True, slots=True)
class KnownFields:
    """Fields that clients of an interface send and the gateway does not read.

    Attributes:
        harmless: fields without effect on the text; accepted without a notice.
        unimplemented: refused by name unless the value is null, false or empty. Fields that an
            empty object turns on are refused unless null.
        neutral: by field, the values that ask for what happens anyway; other values are refused.
        renamed: names that unimplemented fields of other interfaces have in this one.
    """

    harmless: frozenset[str] = frozenset()
    unimplemented: frozenset[str] = frozenset()
    neutral: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    renamed: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of_generation(
        cls,
        harmless: frozenset[str],
        unimplemented: frozenset[str] = frozenset(),
        neutral: Mapping[str, tuple[Any, ...]] | None = None,
        renamed: Mapping[str, str] | None = None,
    ) -> Self:
        """Returns the fields of an interface that generates text. Fields that only another of these
        interfaces reads are refused: they would change the answer here as well."""
        refused = unimplemented | (_UNIMPLEMENTED | _OPENAI_FIELDS) - harmless
        return cls(harmless, refused, {**_NEUTRAL, **(neutral or {})}, renamed or {})

    def refuse(self, body: Body, prefix: str = "") -> None:
        """Gives the client a notice of the body's unknown fields.

        Raises:
            InvalidArgument: a field asks for something the gateway cannot do; names it.
        """
        unread_fields = (body.model_extra or {}).items()
        unknown = [name for name, value in unread_fields if not self._check(name, value, prefix)]
        if unknown:
            names = ", ".join(repr(prefix + name[:64]) for name in unknown[:_MAX_NAMED])
            give_notice(f"unknown fields are ignored: {names}")

    def _check(self, name: str, value: object, prefix: str) -> bool:
        """Returns whether the field is known; refuses a known one that asks for something."""
        if name in self.harmless:
            return True
        if name not in self.unimplemented and name not in self.neutral:
            return False
        neutral = self.neutral.get(name, ())
        is_on_by_default = any(choice is True for choice in neutral)
        is_asked = value is False if is_on_by_default else value and value not in neutral
        if is_asked or (name in _ON_IF_EMPTY and value is not None):
            if name in self.renamed:
                message = f"{prefix}{name} is named {prefix}{self.renamed[name]} here"
                raise InvalidArgument.of("NOT_IMPLEMENTED", prefix + name, message)
            raise unimplemented(prefix + name)
        return True


_HARMLESS = frozenset(
    {
        *("user", "store", "metadata", "stream_reasoning", "safety_identifier", "prompt_cache_key"),
        *("prompt_cache_options", "prompt_cache_retention"),
        # Fast tokenizers never put spaces between special tokens.
        "spaces_between_special_tokens",
    }
)

_UNIMPLEMENTED = frozenset(
    {
        *("audio", "custom_logit_processor", "custom_params"),
        # Samplers of llama.cpp and others, and their names of fields with another name here.
        *("dry_multiplier", "dynatemp_range", "mirostat", "n_predict", "repeat_penalty"),
        *("samplers", "tfs_z", "top_a", "top_n_sigma", "typical_p", "xtc_probability", "lora"),
        *("n_probs", "post_sampling_probs", "response_fields", "t_max_predict_ms"),
        # vLLM's and SGLang's: further parts of an answer, stop conditions and watermarks.
        *("enable_response_messages", "previous_input_messages", "repetition_detection"),
        *("require_reasoning", "max_thinking_tokens", "return_bytes"),
        *("return_cached_tokens_details", "return_entropy", "return_flat_raw_output_top_logprobs"),
        *("return_flat_raw_top_logprobs", "return_indexer_topk", "return_input_ids_in_sglext"),
        *("return_meta_info", "return_output_ids_in_sglext", "return_prompt_text"),
        *("return_prompt_token_ids", "return_routed_experts", "return_sampling_mask"),
        *("return_spec_tokens_details", "return_weight_versions", "routed_experts_prompt_start"),
        *("routed_experts_start_len", "sampling_logprobs_mode", "task", "thinking_budget"),
        *("watermark", "watermarking", "chat_template", "documents", "ec_transfer_params"),
        *("kv_transfer_params", "function_call", "functions", "input_embeds", "length_penalty"),
        *("lora_id", "lora_path", "lora_request", "logits_processors", "moderation"),
        *("prompt_embeds", "return_hidden_states", "session_params", "suffix", "token_ids_logprob"),
        *("use_beam_search", "web_search_options"),
    }
)

_ON_IF_EMPTY = frozenset({"web_search_options"})

_NEUTRAL = {
    "add_generation_prompt": (True,),
    "best_of": (1,),
    "include_reasoning": (True,),
    "adaptive_target": (-1.0,),
    "length_penalty": (1.0,),
    "modalities": (["text"],),
    "n": (1,),
    "n_predict": (-1,),
    "parallel_tool_calls": (True,),
    "reasoning_format": ("auto", "deepseek"),
    "repeat_penalty": (1.0,),
    "response_format": ({"type": "text"},),
    "separate_reasoning": (True,),
    "tfs_z": (1.0,),
    "tool_choice": ("auto", "none"),
    "top_n_sigma": (-1.0,),
    "typical_p": (1.0,),
}

_OPENAI_FIELDS = (
    ChatCompletionRequest.model_fields.keys() | CompletionRequest.model_fields.keys()
) - {*("metadata", "model", "priority", "service_tier", "store", "stream", "stream_options")}

_REASONING_FIELDS = frozenset({"include_reasoning", "separate_reasoning"})
CHAT_FIELDS = KnownFields.of_generation(_HARMLESS)
COMPLETION_FIELDS = KnownFields.of_generation(_HARMLESS | _REASONING_FIELDS)
"""A completion's output is all text, reasoning included."""


def refuse_unimplemented(body: GenerationBody) -> None:
    """Gives the client a notice of unknown fields.

    Raises:
        InvalidArgument: a field asks for something the gateway cannot do; names it.
    """
    if body.model_extra:
        is_chat = isinstance(body, ChatCompletionRequest)
        (CHAT_FIELDS if is_chat else COMPLETION_FIELDS).refuse(body)
    if body.prediction is not None:
        check_texts("prediction.content", body.prediction.content)
    if body.speculation is not None:
        for name in body.speculation.model_extra or ():
            raise unimplemented(f"speculation.{name}")


def leave_out_hosted(field: str, kind: str) -> None:
    """Gives the notice that a hosted tool, which only its vendor's servers run, is left out. It is
    no error: agents send such tools with every request, and the model may answer without them."""
    give_notice(f"{field} is left out: tools of type {kind[:64]!r} are not run here")


def refuse_rounds(speculation: Speculation | None) -> None:
    """Raises:
    InvalidArgument: the request asks for rounds, which this interface's answers cannot hold.
    """
    if speculation is not None and speculation.trace:
        raise unimplemented("speculation.trace", "speculation.trace in this interface")


def check_texts(field: str, content: str | Sequence[ContentPart] | None) -> None:
    """Raises:
    InvalidArgument: a part of the content is not text, or has none.
    """
    for index, part in enumerate(() if isinstance(content, str) else content or ()):
        if part.type != "text":
            raise unread(f"{field}[{index}]", part.type)
        required(f"{field}[{index}].text", part.text)


def unread(field: str, kind: str) -> InvalidArgument:
    """Returns the refusal of a message part that is not text."""
    return unimplemented(f"{field}.type", f"content of type {kind[:64]!r}")


def required(field: str, value: T | None) -> T:
    """Raises:
    InvalidArgument: the value is missing.
    """
    if value is None:
        raise InvalidArgument.of("FIELD_INVALID", field, f"{field} is missing")
    return value


def unimplemented(field: str, what: str | None = None) -> InvalidArgument:
    """Returns the refusal of a field; `what` describes it where its name is not enough."""
    return InvalidArgument.of("NOT_IMPLEMENTED", field, f"{what or field} is not implemented")
