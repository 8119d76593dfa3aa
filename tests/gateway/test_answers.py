"""Whole answers hold the fields and types that the document gives them, and no others."""

from __future__ import annotations

from typing import Any, TypeVar

import httpx
import orjson
import pytest
from pydantic import BaseModel, ValidationError

from gateway.messages.schema import MessageAnswer
from gateway.model_text import ModelText
from gateway.native.schema import GenerateAnswer
from gateway.openapi import ChatAnswer, CompletionAnswer
from gateway.responses.schema import ResponseAnswer
from tests.gateway.driving import MESSAGES, MakeGateway, http_client, say
from tests.gateway.thinking_model import OUTPUT, SCHEMA
from tests.helpers.fake_target import FakeTarget

T = TypeVar("T", bound=BaseModel)
RESPONSE = {"model": "fake", "input": "then"}
CHAT = {"model": "fake", "messages": MESSAGES}
MESSAGE = {"model": "fake", "max_tokens": 400, "messages": MESSAGES}
FUNCTION = {"type": "function", "name": "weather", "parameters": SCHEMA, "strict": False}
TOOL = {"name": "weather", "input_schema": SCHEMA}


def _documented(answer: dict[str, Any], kind: type[T]) -> T:
    """Holds an answer against the type that the document is made from: no value may be converted,
    and no field be there that the type lacks."""
    return kind.model_validate_json(orjson.dumps(answer), strict=True, extra="forbid")


async def _answer(client: httpx.AsyncClient, path: str, body: dict[str, Any]) -> Any:
    response = await client.post(path, json=body)
    assert response.status_code == 200, response.text
    return response.json()


async def test_the_document_has_these_types(client: httpx.AsyncClient) -> None:
    document = (await client.get("/openapi.json")).json()
    schemas = document["components"]["schemas"]
    for path, kind in (("/v1/responses", ResponseAnswer), ("/v1/messages", MessageAnswer)):
        content = document["paths"][path]["post"]["responses"]["200"]["content"]
        reference = {"$ref": f"#/components/schemas/{kind.__name__}"}
        assert content["application/json"]["schema"] == reference
        always = set(kind.model_fields) - {"schema_check"}
        assert set(schemas[kind.__name__]["required"]) == always
    one = {"$ref": "#/components/schemas/GenerateAnswer"}
    for method in ("post", "put"):
        content = document["paths"]["/generate"][method]["responses"]["200"]["content"]
        either = [one, {"type": "array", "items": one}]
        assert content["application/json"]["schema"]["anyOf"] == either
    assert schemas["GenerateAnswer"]["required"] == ["text", "output_ids", "meta_info"]
    assert "default" not in schemas["MetaInfo"]["properties"]["spec_verify_ct"]


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"max_output_tokens": 2},
        {"top_logprobs": 2, "instructions": "be nice", "metadata": {"a": "b"}, "temperature": 0.5},
        {"text": {"format": {"type": "json_schema", "name": "a", "schema": SCHEMA}}},
        {"reasoning": {"effort": "low"}},
    ],
)
async def test_responses(client: httpx.AsyncClient, body: dict[str, Any]) -> None:
    answer = _documented(
        await _answer(client, "/v1/responses", {**RESPONSE, **body}), ResponseAnswer
    )
    [message] = answer.output
    assert message.type == "message"
    assert answer.status == ("incomplete" if "max_output_tokens" in body else "completed")
    assert bool(message.content[0].logprobs) == ("top_logprobs" in body)


@pytest.mark.parametrize(
    "choice", ["auto", "required", {"type": "function", "name": "weather"}], ids=str
)
async def test_responses_of_a_model_that_thinks_and_calls(
    make_gateway: MakeGateway, target: FakeTarget, thinking_text: ModelText, choice: Any
) -> None:
    await say(target, thinking_text.tokenizer, OUTPUT)
    gateway = await make_gateway(target, text=thinking_text)
    body = {**RESPONSE, "tools": [FUNCTION, {"type": "function", "name": "now"}]}
    async with http_client(gateway) as client:
        found = await _answer(client, "/v1/responses", {**body, "tool_choice": choice})
    kinds = [item.type for item in _documented(found, ResponseAnswer).output]
    assert kinds == ["reasoning", "message", "function_call", "function_call"]


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"max_tokens": 2, "n": 2, "service_tier": "auto"},
        {"logprobs": True, "top_logprobs": 2, "return_tokens_as_token_ids": True},
        {"stop": "fox", "return_token_ids": True, "prompt_logprobs": 1},
        {"speculation": {"trace": True}},
        {"response_format": {"type": "json_object", "schema": SCHEMA}},
    ],
    ids=["plain", "two", "scored", "stop", "traced", "checked"],
)
async def test_chats(client: httpx.AsyncClient, body: dict[str, Any]) -> None:
    found = await _answer(client, "/v1/chat/completions", {**CHAT, **body})
    choices = _documented(found, ChatAnswer).choices
    assert [choice.index for choice in choices] == [*range(body.get("n", 1))]
    assert (choices[0].logprobs is not None) == ("logprobs" in body)
    assert (choices[0].speculation is not None) == ("speculation" in body)


async def test_chats_of_a_model_that_thinks_and_calls(
    make_gateway: MakeGateway, target: FakeTarget, thinking_text: ModelText
) -> None:
    await say(target, thinking_text.tokenizer, OUTPUT)
    gateway = await make_gateway(target, text=thinking_text)
    functions = [{"name": "weather", "parameters": SCHEMA}, {"name": "now"}]
    tools = [{"type": "function", "function": each} for each in functions]
    async with http_client(gateway) as client:
        found = await _answer(client, "/v1/chat/completions", {**CHAT, "tools": tools})
    [choice] = _documented(found, ChatAnswer).choices
    assert choice.finish_reason == "tool_calls"
    assert len(choice.message.tool_calls) == 2
    assert choice.message.reasoning == choice.message.reasoning_content != ""


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"prompt": ["the fox", "then"], "n": 2, "best_of": 3},
        {"logprobs": 2},
        {"logprobs": 2, "echo": True},
        {"stop": "fox", "return_token_ids": True, "prompt_logprobs": 1},
        {"speculation": {"trace": True}},
    ],
    ids=["plain", "four", "scored", "echoed", "stop", "traced"],
)
async def test_completions(client: httpx.AsyncClient, body: dict[str, Any]) -> None:
    asked = {"model": "fake", "prompt": "the fox", **body}
    choices = _documented(await _answer(client, "/v1/completions", asked), CompletionAnswer).choices
    assert len(choices) == (4 if "n" in body else 1)
    scores = choices[0].logprobs
    assert (scores is not None) == ("logprobs" in body)
    assert scores is None or (scores.token_logprobs[0] is None) == ("echo" in body)


@pytest.mark.parametrize(
    "body", [{}, {"max_tokens": 2}, {"stop_sequences": ["fox"]}], ids=["end", "length", "stop"]
)
async def test_messages(
    client: httpx.AsyncClient, target: FakeTarget, thinking_text: ModelText, body: dict[str, Any]
) -> None:
    await say(target, thinking_text.tokenizer, "the quick brown fox jumps")
    found = await _answer(client, "/v1/messages", {**MESSAGE, **body})
    [block] = _documented(found, MessageAnswer).content
    assert block.type == "text"


async def test_messages_of_a_model_that_thinks_and_calls(
    make_gateway: MakeGateway, target: FakeTarget, thinking_text: ModelText
) -> None:
    await say(target, thinking_text.tokenizer, OUTPUT)
    gateway = await make_gateway(target, text=thinking_text)
    thinking = {"thinking": {"type": "enabled", "budget_tokens": 1024}}
    async with http_client(gateway) as client:
        body = {**MESSAGE, **thinking, "tools": [TOOL, {"name": "now"}]}
        found = await _answer(client, "/v1/messages", body)
    answer = _documented(found, MessageAnswer)
    assert [block.type for block in answer.content] == ["thinking", "text", "tool_use", "tool_use"]
    assert answer.stop_reason == "tool_use"


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"sampling_params": {"stop": "fox"}},
        {"return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": 2},
        {"return_logprob": True, "return_text_in_logprobs": True},
        {"speculation": {"trace": True}},
    ],
    ids=["plain", "stop", "scored", "spelled", "traced"],
)
async def test_generate(client: httpx.AsyncClient, body: dict[str, Any]) -> None:
    one = await _answer(client, "/generate", {"text": "the fox", **body})
    assert _documented(one, GenerateAnswer).meta_info.finish_reason is not None
    batch = await _answer(client, "/generate", {"text": ["the fox", "then"], **body})
    assert [_documented(each, GenerateAnswer).index for each in batch] == [0, 1]


async def test_a_field_that_is_not_documented_is_found(client: httpx.AsyncClient) -> None:
    answer = await _answer(client, "/v1/messages", MESSAGE)
    with pytest.raises(ValidationError, match="extra_forbidden"):
        _documented({**answer, "container": None}, MessageAnswer)
    with pytest.raises(ValidationError, match="usage"):
        _documented({**answer, "usage": {}}, MessageAnswer)
    usage = {**answer["usage"], "output_tokens": "3"}
    with pytest.raises(ValidationError, match="output_tokens"):
        _documented({**answer, "usage": usage}, MessageAnswer)
