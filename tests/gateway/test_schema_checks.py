"""Schemas that say more than a grammar holds: the rest is told and checked at the end."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from gateway.answer import SchemaChecks
from gateway.model_text import ModelText
from gateway.schema_trial import verdict
from shared.text import Tokenizer
from tests.gateway.driving import CHAT, MESSAGES, MakeGateway, events, http_client, say
from tests.helpers.fake_target import FakeTarget

SCHEMA = {"type": "array", "items": {"type": "integer"}, "uniqueItems": True}
HELD = {"type": "array", "items": {"type": "integer"}}
GOOD = {"valid": True, "error": None, "path": None}
BAD = {"valid": False, "error": "[1,1] has non-unique elements", "path": ""}
FORMAT = {"type": "json_schema", "name": "n", "schema": SCHEMA}
PLACES: dict[str, tuple[str, dict[str, Any]]] = {
    "chats": (
        "/v1/chat/completions",
        {**CHAT, "response_format": {"type": "json_schema", "json_schema": FORMAT}},
    ),
    "json_object": (
        "/v1/chat/completions",
        {**CHAT, "response_format": {"type": "json_object", "schema": SCHEMA}},
    ),
    "completions": (
        "/v1/completions",
        {"model": "fake", "prompt": "then", "guided_json": SCHEMA, "max_tokens": 50},
    ),
    "responses": ("/v1/responses", {"input": "then", "text": {"format": FORMAT}}),
    "messages": (
        "/v1/messages",
        {"model": "fake", "max_tokens": 50, "messages": MESSAGES, "output_format": FORMAT},
    ),
    "generate": (
        "/generate",
        {
            "text": "then",
            "sampling_params": {"json_schema": json.dumps(SCHEMA), "max_new_tokens": 50},
        },
    ),
}
CALL = '<tool_call>{"name": "pick", "arguments": {"of": [1, 1]}}</tool_call>'
TOOL_SCHEMA = {"type": "object", "properties": {"of": SCHEMA}}
TOOLS = [{"type": "function", "function": {"name": "pick", "parameters": TOOL_SCHEMA}}]


def _checks(found: Any) -> list[Any]:
    """Returns every `schema_check` in an answer."""
    if isinstance(found, list):
        return [check for each in found for check in _checks(each)]
    if not isinstance(found, dict):
        return []
    own = [found["schema_check"]] if "schema_check" in found else []
    return own + [check for each in found.values() for check in _checks(each)]


def _streamed(response: httpx.Response) -> list[Any]:
    data = [line[6:] for line in response.text.splitlines() if line.startswith("data: {")]
    return [json.loads(line) for line in data]


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize(("said", "expected"), [("[1,2]", GOOD), ("[1,1]", BAD)])
async def test_the_answer_is_checked_at_its_end(
    client: httpx.AsyncClient,
    target: FakeTarget,
    tokenizer: Tokenizer,
    place: str,
    said: str,
    expected: dict[str, Any],
) -> None:
    await say(target, tokenizer, said, per_step=1)
    path, body = PLACES[place]
    whole = await client.post(path, json=body)
    streamed = await client.post(path, json={**body, "stream": True})
    for response, answer in ((whole, whole.json()), (streamed, _streamed(streamed))):
        assert response.status_code == 200
        assert _checks(answer) == [expected]
        assert "uniqueItems in the schema" in response.headers["x-outrider-notice"]
        assert "schema_check" in response.headers["x-outrider-notice"]
    assert said in whole.text
    grammars = [json.loads(each.request.grammar.json_schema) for each in target.submits]
    assert grammars == [HELD, HELD]


async def test_each_choice_has_its_own_check(
    client: httpx.AsyncClient, target: FakeTarget, tokenizer: Tokenizer
) -> None:
    await say(target, tokenizer, "[1,1]")
    path, body = PLACES["chats"]
    streamed = events((await client.post(path, json={**body, "stream": True, "n": 3})).content)
    last = [e["choices"][0] for e in streamed[:-1] if e["choices"][0]["finish_reason"]]
    assert sorted(choice["index"] for choice in last) == [0, 1, 2]
    assert [choice["schema_check"] for choice in last] == [BAD] * 3


async def test_an_answer_that_is_cut_is_not_checked(
    client: httpx.AsyncClient, target: FakeTarget, tokenizer: Tokenizer
) -> None:
    await say(target, tokenizer, "[1,1]", per_step=1)
    path, body = PLACES["chats"]
    answer = (await client.post(path, json={**body, "max_tokens": 1})).json()
    assert answer["choices"][0]["finish_reason"] == "length"
    assert _checks(answer) == []


async def test_what_a_grammar_holds_is_not_checked(
    client: httpx.AsyncClient, target: FakeTarget, tokenizer: Tokenizer
) -> None:
    await say(target, tokenizer, "[1,1]")
    body = {**CHAT, "response_format": {"type": "json_object", "schema": HELD}}
    response = await client.post("/v1/chat/completions", json=body)
    assert _checks(response.json()) == []
    assert "x-outrider-notice" not in response.headers
    assert json.loads(target.submits[-1].request.grammar.json_schema) == HELD


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ({"tool_choice": "required"}, 1),
        (
            {"tools": [{"type": "function", "function": {**TOOLS[0]["function"], "strict": True}}]},
            1,
        ),
        ({"response_format": {"type": "json_object"}}, 1),
        ({}, 0),
    ],
    ids=["required", "strict", "beside a format", "free"],
)
async def test_arguments_of_held_calls_are_checked(
    make_gateway: MakeGateway,
    target: FakeTarget,
    thinking_text: ModelText,
    tokenizer: Tokenizer,
    stream: bool,
    asked: dict[str, Any],
    expected: int,
) -> None:
    gateway = await make_gateway(target, text=thinking_text)
    await say(target, tokenizer, f"<think>a</think>{CALL}", per_step=1)
    body = {**CHAT, "tools": TOOLS, "stream": stream, **asked}
    async with http_client(gateway) as client:
        response = await client.post("/v1/chat/completions", json=body)
    assert response.status_code == 200, response.text
    checks = _checks(_streamed(response) if stream else response.json())
    assert checks == [{**BAD, "path": "/of"}] * expected
    notice = "uniqueItems in the schema of the tool 'pick' is checked at the end only"
    assert (notice in response.headers.get("x-outrider-notice", "")) == bool(expected)


async def test_a_wrong_schema_is_refused_by_its_field(client: httpx.AsyncClient) -> None:
    wrong = {"type": "json_object", "schema": {"not": 5}}
    for body, field in (
        ({**CHAT, "response_format": wrong}, "response_format.schema"),
        ({**CHAT, "guided_json": {"uniqueItems": 1}}, "guided_json"),
    ):
        response = await client.post("/v1/chat/completions", json=body)
        assert response.status_code == 400
        assert response.json()["error"]["param"] == field
        assert "the JSON schema is wrong at" in response.json()["error"]["message"]


async def test_a_check_that_takes_for_ever_is_given_up(
    make_gateway: MakeGateway, target: FakeTarget, tokenizer: Tokenizer
) -> None:
    gateway = await make_gateway(target)
    object.__setattr__(gateway, "schema_checks", SchemaChecks(timeout_s=0.3))
    await say(target, tokenizer, "[1]")
    slow: dict[str, Any] = {"a0": {"type": "integer"}}
    for number in range(60):
        slow[f"a{number + 1}"] = {"allOf": [{"$ref": f"#/$defs/a{number}"}] * 2}
    schema = {"$defs": slow, "items": {"not": {"$ref": "#/$defs/a60"}}}
    body = {**CHAT, "response_format": {"type": "json_object", "schema": schema}}
    async with http_client(gateway) as client:
        response = await client.post("/v1/chat/completions", json=body)
    message = response.json()["choices"][0]
    assert message["message"]["content"] == "[1]"
    assert message["schema_check"]["valid"] is None
    assert message["schema_check"]["error"] == "the check took more than 0.3 s"


@pytest.mark.parametrize(
    ("schema", "text", "expected"),
    [
        ({"uniqueItems": True}, "[1, 1.0]", False),
        ({"uniqueItems": True}, "[1, true]", True),
        ({"uniqueItems": True}, "[1", False),
        ({"not": {"$ref": "http://127.0.0.1:9/x"}}, "1", None),
        ({"pattern": r"^(a|a)*\1$"}, f'"{"a" * 30}b"', False),
    ],
)
def test_verdicts(schema: dict[str, Any], text: str, expected: bool | None) -> None:
    assert verdict(schema, text)["valid"] is expected
