"""The OpenAPI document of the gateway's routes, the page at `/docs` that shows it, and the types of
answers in it. The gateway builds its answers without these types; tests check that every answer
fits its type and has no field beyond it."""

from __future__ import annotations

import asyncio
import functools
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import jinja2
import orjson
from fastapi import FastAPI, Request
from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt
from starlette.responses import Response

_TEMPLATE = Path(__file__).with_name("openapi.html.jinja")
_HEADERS = {
    "content-security-policy": "default-src 'none'; style-src 'unsafe-inline'",
    "x-content-type-options": "nosniff",
}
Schema = dict[str, Any]
_STREAMED = frozenset(
    {"/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/generate"}
)
_CHAT = ("/v1/chat/completions", "post")
_DESCRIPTIONS = {
    400: "a field is missing, malformed, out of range or not implemented",
    401: "the API key is missing or wrong",
    403: "the key's scope does not allow it",
    404: "no such model, response or route",
    410: "somebody aborted the request",
    408: "the body did not arrive in time",
    413: "the body is larger than the gateway takes",
    429: "the target's queue is full, or a limit of the key is reached; see `retry-after`",
    500: "the gateway or the engine failed",
    501: "not set up here; the message names the setting",
    503: "no target takes requests, or the gateway is stopping",
    504: "it took longer than allowed",
}
_STATUSES_OF_ALL: tuple[int, ...] = (400, 401, 404, 500, 503, 504)
_STATUSES_OF_BODIES = (408, 413)
_STATUSES_OF_LIMITED = (429,)  # limits of keys count POST and PUT requests
_EVENT: Schema = {
    "type": "object",
    "description": "One event; its data is a JSON object, or `[DONE]` at the end of OpenAI's.",
    "required": ["data"],
    "properties": {"event": {"type": "string"}, "data": {"type": "string"}},
}
_NULLABLE_TEXT: Schema = {"anyOf": [{"type": "string"}, {"type": "null"}]}
_ERRORS: dict[str, Schema] = {
    "Error": {
        "type": "object",
        "description": "OpenAI's shape. `param` names the field as the client sent it.",
        "required": ["error"],
        "properties": {
            "error": {
                "type": "object",
                "required": ["message", "type", "param", "code"],
                "properties": {
                    "message": {"type": "string"},
                    "type": {"type": "string"},
                    "param": _NULLABLE_TEXT,
                    "code": {"type": "string"},
                },
            }
        },
    },
    "AnthropicError": {
        "type": "object",
        "description": "Anthropic's shape, of the routes below `/v1/messages`.",
        "required": ["type", "error", "request_id"],
        "properties": {
            "type": {"const": "error"},
            "error": {
                "type": "object",
                "required": ["type", "message"],
                "properties": {"type": {"type": "string"}, "message": {"type": "string"}},
            },
            "request_id": {"type": "string"},
        },
    },
}


class DocumentedApp(FastAPI):
    """An application whose OpenAPI document also describes its errors and streams."""

    def setup(self) -> None:
        """Adds the document and its page, which need no API key. Making them takes a second;
        FastAPI's own route would block the event loop, and so every stream, for that time."""
        self._document_lock = threading.Lock()
        make = functools.cache(lambda: orjson.dumps(self.openapi()))
        make_page = functools.cache(lambda: _page(self.openapi()))

        async def document(_request: Request) -> Response:
            content = await asyncio.to_thread(make)
            return Response(content, media_type="application/json")

        async def page(_request: Request) -> Response:
            content = await asyncio.to_thread(make_page)
            return Response(content, headers=_HEADERS, media_type="text/html")

        self.add_route("/openapi.json", document, include_in_schema=False)
        self.add_route("/docs", page, methods=["GET"], include_in_schema=False)

    def openapi(self) -> Schema:
        with self._document_lock:
            if self.openapi_schema is None:
                document = super().openapi()
                _complete(document)
                self.openapi_schema = document
            return self.openapi_schema


def _page(document: Schema) -> str:
    """Returns the page of a document."""
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    template = environment.from_string(_TEMPLATE.read_text(encoding="utf-8"))
    return template.render(document=document)


def _complete(document: Schema) -> None:
    schemas = document.setdefault("components", {}).setdefault("schemas", {})
    for name in ("HTTPValidationError", "ValidationError"):
        schemas.pop(name, None)
    schemas.update(_ERRORS)
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            responses = operation["responses"]
            responses.pop("422", None)
            _add_content(responses, path, method)
            for status in _statuses(path, method, operation["tags"]):
                responses[str(status)] = _error(status, path)


def _add_content(responses: Schema, path: str, method: str) -> None:
    if path in _STREAMED and method != "get":
        responses["200"]["content"]["text/event-stream"] = {"itemSchema": _EVENT}
    if path == "/metrics":
        responses["200"]["content"] = {"text/plain": {"schema": {"type": "string"}}}
    if path in ("/health", "/ready"):
        not_ready = {**responses["200"], "description": "takes no requests now"}
        responses["503"] = not_ready


def _statuses(path: str, method: str, tags: list[str]) -> tuple[int, ...]:
    if "operations" in tags:
        return ()
    statuses = _STATUSES_OF_ALL
    if method in ("post", "put"):
        statuses += _STATUSES_OF_BODIES
    # Routes that generate answer 429 by any method: the target's queue may be full.
    if method in ("post", "put") or path in (*_STREAMED, "/health_generate"):
        statuses += _STATUSES_OF_LIMITED
    if path in (*_STREAMED, "/health_generate", "/v1/responses/compact"):
        statuses += (410,)
    is_stored_chat = path.startswith("/v1/chat/completions") and (path, method) != _CHAT
    if path.startswith("/v1/conversations") or is_stored_chat:
        statuses += (501,)
    if path == "/flush_cache" or "rollouts" in tags:
        statuses += (403, 501)
    return statuses


def _error(status: int, path: str) -> Mapping[str, Any]:
    name = "AnthropicError" if path.startswith("/v1/messages") else "Error"
    schema = {"$ref": f"#/components/schemas/{name}"}
    content = {"application/json": {"schema": schema}}
    return {"description": _DESCRIPTIONS[status], "content": content}


def _without_defaults(schema: dict[str, Any]) -> None:
    """Removes defaults from a schema: a field that is absent from an answer has no value."""
    for field in schema["properties"].values():
        field.pop("default", None)


class Answered(BaseModel):
    """A JSON object in an answer. Fields without a default are always present."""

    model_config = ConfigDict(protected_namespaces=(), json_schema_extra=_without_defaults)


class SpeculationMetrics(Answered):
    """Speculation figures of an answer."""

    mean_acceptance_length: float = Field(
        ge=1, description="mean tokens per round that verified a tree, bonus token included"
    )
    draft_acceptance_rate: float = Field(ge=0, le=1)
    acceptance_histogram: list[NonNegativeInt] = Field(
        description="element n counts the rounds that accepted n draft tokens"
    )
    num_spec_steps: NonNegativeInt
    num_accepted_draft_tokens: NonNegativeInt
    num_draft_tokens: NonNegativeInt
    num_spec_tokens: NonNegativeInt = Field(description="length of the longest accepted path")


class AnswerMetrics(Answered):
    """Figures of one answer, under vLLM's names."""

    queue_time_ms: float
    time_to_first_token_ms: float
    generation_time_ms: float = Field(description="from the first token to the last")
    mean_itl_ms: float = Field(default=0.0, description="absent for a single token")
    tokens_per_second: float
    speculative_decoding: SpeculationMetrics | None = Field(
        description="null when no tree was verified"
    )


class Timings(Answered):
    """Durations of an answer, under llama.cpp's names."""

    queue_ms: float
    cache_n: NonNegativeInt
    prompt_n: NonNegativeInt
    prompt_ms: float
    prompt_per_second: float
    predicted_n: NonNegativeInt
    predicted_ms: float = Field(description="from the first token to the last")
    predicted_per_second: float
    draft_n: NonNegativeInt
    draft_n_accepted: NonNegativeInt


class SchemaCheck(Answered):
    """Whether an answer satisfies the parts of its schema that no grammar enforces."""

    valid: bool | None = Field(description="null if it could not be checked")
    error: str | None = Field(description="the first violation")
    path: str | None = Field(description="place of the violation, as a JSON pointer")


class TokenAlternative(Answered):
    """An alternative to a token of the text."""

    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(TokenAlternative):
    """A token of the text, and the likeliest tokens in its place."""

    top_logprobs: list[TokenAlternative]


class PromptUsage(Answered):
    """The parts of `prompt_tokens`."""

    cached_tokens: NonNegativeInt


class OutputUsage(Answered):
    """The parts of `completion_tokens`; prediction tokens include tokens proposed by drafts."""

    accepted_prediction_tokens: NonNegativeInt
    rejected_prediction_tokens: NonNegativeInt
    reasoning_tokens: NonNegativeInt


class Usage(Answered):
    """Tokens of a request; its prompt counts once, whatever `n` is."""

    prompt_tokens: NonNegativeInt
    completion_tokens: NonNegativeInt
    total_tokens: NonNegativeInt
    prompt_tokens_details: PromptUsage
    completion_tokens_details: OutputUsage
    reasoning_tokens: NonNegativeInt = Field(description="the same count, in SGLang's place")


class TracedTree(Answered):
    """The candidate tree of a round; its lists have one element per node."""

    token_ids: list[int]
    texts: list[str]
    parents: list[int | None] = Field(description="index of each node's parent; null: the root")
    log_probs: list[float] = Field(description="draft log probabilities, given the parent")


class TracedToken(Answered):
    """A token that a round added to the output."""

    id: int
    text: str
    source: Literal["accepted", "bonus", "plain"]


class TracedRound(Answered):
    """One step of the target, when `speculation.trace` asks for it."""

    round: NonNegativeInt
    algorithm: str | None
    rows: int = Field(description="tokens of all requests in this step of the target")
    wait_ms: float
    verify_ms: float
    draft_ms: float | None
    tree: TracedTree | None
    accepted_nodes: list[int]
    tokens: list[TracedToken]


class TracedChoice(Answered):
    """The rounds of a choice."""

    rounds: list[TracedRound]


class AnsweredChoice(Answered):
    """What choices of chats and completions have in common."""

    index: NonNegativeInt
    finish_reason: Literal["stop", "length", "tool_calls"]
    stop_reason: str | int | None = Field(
        description="the `stop` text or `stop_token_ids` token that ended the output, as in vLLM"
    )
    matched_stop: str | int | None = Field(description="the same, but also for the model's EOS")
    schema_check: SchemaCheck | None = Field(
        default=None, description="absent without a schema, or if a grammar enforces it all"
    )
    token_ids: list[int] | None = Field(description="with `return_token_ids`")
    speculation: TracedChoice | None = Field(
        default=None, description="absent without `speculation.trace`"
    )


class CalledFunction(Answered):
    """A function and the arguments of a call."""

    name: str
    arguments: str = Field(description="a JSON object, as text")


class ChatCall(Answered):
    """A call of a tool."""

    id: str
    type: Literal["function"]
    function: CalledFunction


class AssistantMessage(Answered):
    """The assistant's message."""

    role: Literal["assistant"]
    content: str | None = Field(description="null if there are only tool calls")
    refusal: None
    tool_calls: list[ChatCall] = Field(default=[], description="absent without calls")
    reasoning_content: str = Field(default="", description="absent without reasoning")
    reasoning: str = Field(default="", description="the same text, under vLLM's newer name")


class ChatLogprobs(Answered):
    """Log probabilities of an answer."""

    content: list[TokenLogprob]
    refusal: None


class ChatChoice(AnsweredChoice):
    """A choice."""

    message: AssistantMessage
    logprobs: ChatLogprobs | None


class CompletionLogprobs(Answered):
    """Log probabilities of a text; an echoed prompt's first token has none."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[NonNegativeInt]


class CompletedText(AnsweredChoice):
    """A choice."""

    text: str
    logprobs: CompletionLogprobs | None
    prompt_token_ids: list[int] | None = Field(description="with `return_token_ids`")
    prompt_logprobs: list[dict[str, Any] | None] | None


class OpenAIAnswer(Answered):
    """What answers of chats and completions have in common."""

    id: str
    created: NonNegativeInt = Field(description="seconds since 1970")
    model: str
    system_fingerprint: str | None = Field(
        description="identifies weights, version and settings: all that outputs depend on"
    )
    service_tier: Literal["default"] | None = Field(
        default=None, description="absent unless the request set it"
    )
    usage: Usage
    metrics: AnswerMetrics
    timings: Timings


class ChatAnswer(OpenAIAnswer):
    """Answer of `/v1/chat/completions`."""

    object: Literal["chat.completion"]
    choices: list[ChatChoice]
    prompt_token_ids: list[int] | None = Field(description="with `return_token_ids`")
    prompt_logprobs: list[dict[str, Any] | None] | None


class CompletionAnswer(OpenAIAnswer):
    """Answer of `/v1/completions`."""

    object: Literal["text_completion"]
    choices: list[CompletedText]
