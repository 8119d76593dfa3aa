"""JSON from the demo model, which knows none: through the gateway, the wire and a real target."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
import pytest_asyncio

from gateway.api_keys import KeyLimits, Quotas
from gateway.model_text import ModelText
from gateway.pool import TargetPool
from gateway.serving import Gateway
from gateway.settings import GatewaySettings
from services.target.settings import DEMO_MODEL
from shared.model_files import tokenizer_sha256
from tests.gateway.driving import error_of, events, eventually, http_client
from tests.helpers.served import target_process

FLAGS = [
    *("--port", "0", "--maintenance-port", "0", "--device", "cpu", "--served-model-name", "demo"),
    *("--max-total-tokens", "4096", "--context-length", "640", "--max-grammar-bytes", "20000"),
    *("--draft", "embedded", "--speculative-algorithm", "NGRAM", "--candidate-wait-sequences=99"),
]
SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 9},
        "kind": {"enum": ["capital", "town"]},
        "age": {"type": "integer", "minimum": 0, "maximum": 9999},
        "rivers": {"type": "array", "items": {"type": "string", "maxLength": 4}, "maxItems": 2},
    },
    "required": ["city", "kind", "age", "rivers"],
    "additionalProperties": False,
}
CHAT = {
    "model": "demo",
    "messages": [{"role": "user", "content": "What is the capital of France?"}],
    "max_tokens": 400,
}
JSON_CHAT = {
    **CHAT, "response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}
}  # fmt: skip


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client() -> AsyncIterator[httpx.AsyncClient]:
    process = target_process(FLAGS)
    await process.start()
    address = f"127.0.0.1:{process.port}"
    pool = TargetPool(GatewaySettings(target=(address,)), tokenizer_sha256(DEMO_MODEL))
    quotas = Quotas([], KeyLimits())
    gateway = Gateway(
        pool=pool,
        text=ModelText.read(DEMO_MODEL),
        settings=GatewaySettings(),
        quotas=quotas,
    )
    pool.start()
    await eventually(lambda: pool.is_serving)
    await gateway.lifecycle.activate()
    async with http_client(gateway) as client:
        yield client
    await pool.close()
    await process.stop(grace_s=0.0)


def _check(value: Any) -> None:
    """Checks a value against `SCHEMA`, keyword by keyword."""
    assert set(value) == set(SCHEMA["required"])
    assert isinstance(value["city"], str)
    assert len(value["city"]) <= 9
    assert value["kind"] in ("capital", "town")
    assert isinstance(value["age"], int)
    assert 0 <= value["age"] <= 9999
    assert len(value["rivers"]) <= 2
    assert all(isinstance(each, str) and len(each) <= 4 for each in value["rivers"])


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("temperature", [0.0, 2.0])
async def test_json_parses_validates_and_is_the_same_without_speculation(
    client: httpx.AsyncClient, temperature: float
) -> None:
    count = 2 if temperature else 1
    body = {**JSON_CHAT, "temperature": temperature, "seed": 5, "n": count}
    drafted = (await client.post("/v1/chat/completions", json=body)).json()
    plain = {**body, "speculation": {"disable": True}}
    undrafted = (await client.post("/v1/chat/completions", json=plain)).json()
    texts = [each["message"]["content"] for each in drafted["choices"]]
    assert texts == [each["message"]["content"] for each in undrafted["choices"]]
    assert {each["finish_reason"] for each in drafted["choices"]} == {"stop"}
    for text in texts:
        _check(json.loads(text))
    assert len(set(texts)) == count
    assert drafted["metrics"]["speculative_decoding"]["num_spec_steps"] > 0
    assert undrafted["metrics"]["speculative_decoding"] is None


@pytest.mark.asyncio(loop_scope="module")
async def test_stream_joins_to_valid_json(client: httpx.AsyncClient) -> None:
    body = {**JSON_CHAT, "stream": True, "seed": 3}
    chunks = events((await client.post("/v1/chat/completions", json=body)).content)
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks[:-1]]
    _check(json.loads("".join(delta.get("content") or "" for delta in deltas)))


CASES = [
    ({"response_format": {"type": "json_object"}, "max_tokens": 24}, r"\{.*"),
    ({"structured_outputs": {"choice": ["Paris", "Rome"]}}, r"Paris|Rome"),
    ({"regex": r"[A-Z][a-z]{2,8}, \d{4}"}, r"[A-Z][a-z]{2,8}, \d{4}"),
    ({"ebnf": 'root ::= "yes" | "no" [0-9]'}, r"yes|no[0-9]"),
    (
        {
            "structured_outputs": {
                "structural_tag": {
                    "format": {
                        "type": "tag",
                        "begin": "<a>",
                        "content": {"type": "regex", "pattern": "[0-9]+"},
                        "end": "</a>",
                    }
                }
            },
        },
        r"<a>[0-9]+</a>",
    ),
]


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize(("fields", "pattern"), CASES)
async def test_output_matches(
    client: httpx.AsyncClient, fields: dict[str, Any], pattern: str
) -> None:
    answer = await client.post("/v1/chat/completions", json={**CHAT, "seed": 1, **fields})
    text = answer.json()["choices"][0]["message"]["content"]
    assert re.fullmatch(pattern, text, re.DOTALL)


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize(
    ("schema", "code", "words"),
    [
        ({"type": "foo"}, "grammar_invalid", "Invalid type: foo"),
        ({"enum": ["x" * 30000]}, "grammar_too_complex", "at most 20,000"),
    ],
)
async def test_bad_schema_is_a_400_before_any_header(
    client: httpx.AsyncClient, schema: dict[str, Any], code: str, words: str
) -> None:
    given = {"type": "json_schema", "json_schema": {"schema": schema}}
    for stream in (False, True):
        body = {**CHAT, "response_format": given, "stream": stream}
        response = await client.post("/v1/chat/completions", json=body)
        status, param, found, message = await error_of(response)
        assert (status, param, found) == (400, "response_format.json_schema", code)
        assert words in message


TOOL = {
    "type": "function",
    "function": {
        "name": "look_up",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "maxLength": 12},
                "deep": {"type": "boolean"},
            },
            "required": ["city", "deep"],
            "additionalProperties": False,
        },
    },
}


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("stream", [False, True])
async def test_required_call_of_a_model_that_knows_no_tools_is_valid(
    client: httpx.AsyncClient, stream: bool
) -> None:
    body = {**CHAT, "tools": [TOOL], "tool_choice": "required", "seed": 4, "stream": stream}
    body["parallel_tool_calls"] = False
    response = await client.post("/v1/chat/completions", json=body)
    if not stream:
        [choice] = response.json()["choices"]
        [call] = choice["message"]["tool_calls"]
        name, arguments = call["function"]["name"], call["function"]["arguments"]
        reason = choice["finish_reason"]
    else:
        chunks = [chunk["choices"][0] for chunk in events(response.content)[:-1]]
        calls = [call for chunk in chunks for call in chunk["delta"].get("tool_calls", ())]
        name, reason = calls[0]["function"]["name"], chunks[-1]["finish_reason"]
        arguments = "".join(call["function"]["arguments"] for call in calls)
    value = json.loads(arguments)
    assert (name, reason, set(value)) == ("look_up", "tool_calls", {"city", "deep"})
    assert len(value["city"]) <= 12
