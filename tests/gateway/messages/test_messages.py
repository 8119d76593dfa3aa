"""`/v1/messages`: Anthropic's shapes, events and errors."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import orjson
import pytest

from gateway.app import Gateway
from gateway.settings import GatewaySettings
from shared.pb.outrider.target.v1 import target_service_pb2 as pb
from shared.text import Tokenizer
from tests.gateway.driving import (
    MESSAGES,
    PROMPT,
    MakeGateway,
    eventually,
    http_client,
    ids_of,
    say,
)
from tests.helpers.fake_target import FakeTarget

BODY = {"model": "fake", "max_tokens": 50, "messages": MESSAGES}


def named_events(body: bytes) -> list[dict[str, Any]]:
    """Returns the events of a stream; each is named as its `type` says."""
    assert body.endswith(b"\n\n")
    parsed = []
    for block in body.removesuffix(b"\n\n").split(b"\n\n"):
        name, data = block.split(b"\n")
        event = orjson.loads(data.removeprefix(b"data: "))
        assert name == b"event: " + event["type"].encode()
        parsed.append(event)
    return parsed


def anthropic_error(response: httpx.Response) -> tuple[int, str, str]:
    """Returns status, type and message of an error in Anthropic's shape."""
    body = response.json()
    assert set(body) == {"type", "error", "request_id"}
    assert body["type"] == "error"
    assert body["request_id"] == response.headers["x-request-id"]
    assert set(body["error"]) == {"type", "message"}
    return response.status_code, body["error"]["type"], body["error"]["message"]


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages/count_tokens"])
async def test_a_tier_that_anthropic_does_not_have_is_refused(
    client: httpx.AsyncClient, path: str
) -> None:
    counted = {name: BODY[name] for name in ("model", "messages")}
    body = counted if path.endswith("count_tokens") else BODY
    for tier in ("auto", "standard_only", None):
        answer = await client.post(path, json={**body, "service_tier": tier})
        assert answer.status_code == 200, answer.text
    answer = await client.post(path, json={**body, "service_tier": "bogus"})
    status, kind, message = anthropic_error(answer)
    assert (status, kind) == (400, "invalid_request_error")
    assert "service_tier" in message
    assert "'bogus'" in message


async def test_a_message_is_answered_with_one_text_block(
    client: httpx.AsyncClient, target: FakeTarget, tokenizer: Tokenizer
) -> None:
    output = await say(target, tokenizer, "the fox")
    target.num_cached_tokens = 2
    answer = (await client.post("/v1/messages", json=BODY)).json()
    assert answer.pop("id").startswith("msg_")
    assert answer.pop("metrics")["speculative_decoding"]["num_spec_steps"] > 0
    assert answer.pop("timings")["cache_n"] == 2
    assert answer.pop("system_fingerprint").startswith("fp_")
    assert answer == {
        "type": "message",
        "role": "assistant",
        "model": "fake",
        "content": [{"type": "text", "text": "the fox"}],
        "stop_reason": "end_turn",
        "stop_sequence": None,
        "usage": {
            # Cached tokens are counted apart.
            "input_tokens": len(await ids_of(tokenizer, PROMPT)) - 2,
            "cache_read_input_tokens": 2,
            "cache_creation_input_tokens": 0,
            "output_tokens": len(output),
        },
    }


async def test_system_blocks_and_sampling_reach_the_target(
    client: httpx.AsyncClient, target: FakeTarget, tokenizer: Tokenizer
) -> None:
    body = {
        **BODY,
        "system": [{"type": "text", "text": "be"}, {"type": "text", "text": "nice"}],
        "messages": [{"role": "user", "content": [{"type": "text", "text": "then"}]}],
        "max_tokens": 3,
        "temperature": 0.5,
        "top_k": 7,
        "top_p": 0.75,
        "metadata": {"user_id": "u"},
        "thinking": {"type": "disabled"},
    }
    assert (await client.post("/v1/messages", json=body)).status_code == 200
    request = target.submits[0].request
    prompt = f"<|system|>be\nnice<|end|>{PROMPT}"
    assert list(request.prompt_token_ids) == await ids_of(tokenizer, prompt)
    drawn = request.sampling_params
    assert (drawn.temperature, drawn.top_k, drawn.top_p) == (0.5, 7, 0.75)
    assert request.stop_params.max_output_token_count == 3


@pytest.mark.parametrize(
    ("extra", "shown", "stop"),
    [
        ({"stop_sequences": ["fox"]}, "the ", ("stop_sequence", "fox")),
        ({"max_tokens": 1}, "the", ("max_tokens", None)),
        ({}, "the fox", ("end_turn", None)),
    ],
)
async def test_the_stop_reason_is_told_whole_and_streamed(
    client: httpx.AsyncClient,
    target: FakeTarget,
    tokenizer: Tokenizer,
    extra: dict[str, Any],
    shown: str,
    stop: tuple[str, str | None],
) -> None:
    await say(target, tokenizer, "the fox")
    whole = (await client.post("/v1/messages", json={**BODY, **extra})).json()
    assert whole["content"][0]["text"] == shown
    assert (whole["stop_reason"], whole["stop_sequence"]) == stop
    response = await client.post("/v1/messages", json={**BODY, **extra, "stream": True})
    delta = named_events(response.content)[-2]
    assert (delta["delta"]["stop_reason"], delta["delta"]["stop_sequence"]) == stop
    assert delta["usage"] == whole["usage"]


async def test_a_stream_has_anthropics_events_in_order(
    client: httpx.AsyncClient, target: FakeTarget, tokenizer: Tokenizer
) -> None:
    output = await say(target, tokenizer, "the quick é fox", per_step=1)
    response = await client.post("/v1/messages", json={**BODY, "stream": True})
    parsed = named_events(response.content)
    kinds = [event["type"] for event in parsed]
    assert kinds[:3] == ["message_start", "content_block_start", "ping"]
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert set(kinds[3:-3]) == {"content_block_delta"}
    message = parsed[0]["message"]
    assert (message["content"], message["stop_reason"]) == ([], None)
    assert message["usage"]["output_tokens"] == 0
    assert parsed[1]["content_block"] == {"type": "text", "text": ""}
    assert {event["index"] for event in parsed[3:-2]} == {0}
    deltas = [event["delta"] for event in parsed[3:-3]]
    assert {delta["type"] for delta in deltas} == {"text_delta"}
    assert "".join(delta["text"] for delta in deltas) == "the quick é fox"
    assert parsed[-2]["usage"]["output_tokens"] == len(output)


async def test_tokens_are_counted_as_they_are_billed(client: httpx.AsyncClient) -> None:
    prompt = {"model": "fake", "messages": MESSAGES, "system": "be nice"}
    counted = (await client.post("/v1/messages/count_tokens", json=prompt)).json()
    answer = (await client.post("/v1/messages", json={**prompt, "max_tokens": 1})).json()
    assert counted == {"input_tokens": answer["usage"]["input_tokens"]}


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages"),
        ({"temperature": 2.5}, "temperature"),
        ({"stop_sequences": [""]}, "stop string"),
        ({"stop_sequences": ["x"] * 17}, "stop"),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "bash_20250124"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"tools": [{"name": "f"}], "tool_choice": {"type": "tool"}}, "tool_choice.name"),
        ({"mcp_servers": [{}]}, "mcp_servers"),
        ({"system": [{"type": "image"}]}, "image"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "image"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]}, "tool_use_id"),
        (
            {
                "messages": [
                    *MESSAGES,
                    {
                        "role": "assistant",
                        "content": [{"type": "tool_use", "id": "1", "name": "f", "input": {}}],
                    },
                ]
            },
            "assistant",
        ),
    ],
)
async def test_what_cannot_be_served_is_refused_by_name(
    client: httpx.AsyncClient, target: FakeTarget, change: dict[str, Any], name: str
) -> None:
    for stream in (False, True):
        response = await client.post("/v1/messages", json={**BODY, **change, "stream": stream})
        status, kind, message = anthropic_error(response)
        assert (status, kind) == (400, "invalid_request_error")
        assert name in message
    assert target.submits == []


async def test_max_tokens_is_required(client: httpx.AsyncClient) -> None:
    body = {"model": "fake", "messages": MESSAGES}
    status, _, message = anthropic_error(await client.post("/v1/messages", json=body))
    assert status == 400
    assert message.startswith("max_tokens")


async def test_errors_have_anthropics_types(make_gateway: MakeGateway, target: FakeTarget) -> None:
    settings = GatewaySettings(max_body_bytes=2048)
    gateway = await make_gateway(target, api_key="sesame", settings=settings)
    async with http_client(gateway) as client:
        denied = await client.post("/v1/messages", json=BODY, headers={"x-api-key": "open"})
        assert anthropic_error(denied)[:2] == (401, "authentication_error")
        client.headers["x-api-key"] = "sesame"
        assert (await client.post("/v1/messages", json=BODY)).status_code == 200
        unknown = await client.post("/v1/messages", json={**BODY, "model": "other"})
        assert anthropic_error(unknown)[:2] == (404, "not_found_error")
        large = await client.post("/v1/messages", json={**BODY, "system": "x" * 4096})
        assert anthropic_error(large)[:2] == (413, "request_too_large")
        wrong = await client.get("/v1/messages")
        assert anthropic_error(wrong)[:2] == (405, "invalid_request_error")


async def test_a_full_target_is_a_rate_limit(client: httpx.AsyncClient, target: FakeTarget) -> None:
    target.refusals.append(pb.RequestFailure(code=8, reason="QUEUE_FULL", message="full"))
    response = await client.post("/v1/messages", json=BODY)
    assert anthropic_error(response) == (429, "rate_limit_error", "full")


async def test_a_stream_that_fails_ends_with_an_error_event(
    client: httpx.AsyncClient, gateway: Gateway, target: FakeTarget
) -> None:
    target.hold_after = 1
    request = asyncio.create_task(client.post("/v1/messages", json={**BODY, "stream": True}))
    await eventually(lambda: gateway.pool.links[0].num_tokens > 0)
    await target.break_sessions()
    parsed = named_events((await request).content)
    assert parsed[-1]["error"]["type"] == "overloaded_error"
    assert "message_stop" not in [event["type"] for event in parsed]
