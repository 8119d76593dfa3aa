"""Requests that nothing could encode, parse or carry: refused by name, and without a trace."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import httpx
import orjson
import pytest

from gateway.app import Gateway
from gateway.generation import Generation, TargetState
from shared.tokens import SamplingParams, StopParams
from tests.gateway.driving import CHAT, MESSAGES, MakeGateway, error_of, eventually
from tests.gateway.test_failures import COMPLETION
from tests.helpers.fake_target import FakeTarget

JSON = {"content-type": "application/json"}
HALF = "\ud800"


def _nested(depth: int) -> bytes:
    return b'{"properties":' * depth + b"1" + b"}" * depth


def _text(body: object) -> bytes:
    """Returns JSON as Python writes it: a lone surrogate as its escape."""
    return json.dumps(body).encode()


@pytest.mark.parametrize(
    ("extra", "param"),
    [
        ({"top_k": 2**31}, "top_k"),
        ({"top_k": 2**80}, "top_k"),
        ({"seed": 2**80}, "seed"),
        ({"priority": 2**40}, "priority"),
        ({"n": 2**70}, "n"),
        ({"regex": HALF}, "regex"),
        ({"speculation": {"algorithm": HALF}}, "speculation.algorithm"),
        ({"stop": ["a", HALF]}, "stop[1]"),
        ({"model": HALF}, "model"),
        ({"logit_bias": {"1": 2**80}}, "logit_bias[1]"),
    ],
)
async def test_what_no_target_could_be_sent_is_refused_by_name(
    client: httpx.AsyncClient, gateway: Gateway, extra: dict[str, Any], param: str
) -> None:
    for url, body in (("/v1/chat/completions", CHAT), ("/v1/completions", COMPLETION)):
        response = await client.post(url, content=_text({**body, **extra}), headers=JSON)
        assert (await error_of(response))[:2] == (400, param)
    assert (gateway.pool.num_live, gateway.pool.links[0].num_reserved_tokens) == (0, 0)


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": HALF}]},
         "messages[0].content"),
        ("/v1/completions", {"prompt": HALF}, "prompt"),
        ("/v1/responses", {"input": HALF}, "input"),
        ("/generate", {"text": HALF}, "text"),
        ("/tokenize", {"prompt": HALF}, "prompt"),
        ("/abort_request", {"rid": HALF}, "rid"),
    ],
)  # fmt: skip
async def test_half_a_surrogate_pair_is_refused_wherever_text_goes(
    client: httpx.AsyncClient, path: str, body: dict[str, Any], param: str
) -> None:
    for content in (_text(body), orjson.dumps({"x": 1})[:-1] + b',"y":"\xed\xa0\x80"}'):
        response = await client.post(path, content=content, headers=JSON)
        status, named, code, message = await error_of(response)
        assert (status, code) == (400, "text_not_unicode")
        assert named == (param if content == _text(body) else "y")
        assert "Unicode" in message


@pytest.mark.parametrize(
    ("before", "depth", "after", "param"),
    [
        (b'"response_format":{"type":"json_schema","json_schema":{"name":"a","schema":', 400, b"}}",
         "response_format"),
        (b'"guided_json":', 400, b"", "guided_json"),
        (b'"tools":[{"type":"function","function":{"name":"f","parameters":', 400, b"}}]", "tools"),
        (b'"metadata":', 1200, b"", "the body"),
    ],
)  # fmt: skip
async def test_deep_json_is_refused_by_name(
    client: httpx.AsyncClient, before: bytes, depth: int, after: bytes, param: str
) -> None:
    content = orjson.dumps(CHAT)[:-1] + b"," + before + _nested(depth) + after + b"}"
    response = await client.post("/v1/chat/completions", content=content, headers=JSON)
    assert (await error_of(response))[:3] == (400, param, "json_too_deep")


async def test_many_brackets_that_are_not_deep_are_taken(client: httpx.AsyncClient) -> None:
    tools = [{"type": "function", "function": {"name": f"f{n}", "parameters": {"a": [{}]}}}
             for n in range(100)]  # fmt: skip
    response = await client.post("/tokenize", json={"messages": MESSAGES, "tools": tools})
    assert response.status_code == 200


@pytest.mark.parametrize(
    ("arguments", "status"),
    [
        ('{"a":' * 990 + "1" + "}" * 990, 400),
        ('{"a":' * 2000, 400),
        ('{"a": "\\ud800"}', 400),
        ("no JSON", 400),
        ('{"a": 1, "b": "unfin', 200),
        ('{"a": 1, "b', 200),
        ("", 200),
    ],
)
async def test_arguments_of_a_history_are_read_as_far_as_they_go(
    client: httpx.AsyncClient, arguments: str, status: int
) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    messages = [*MESSAGES, {"role": "assistant", "content": None, "tool_calls": [call]}, *MESSAGES]
    body = {**CHAT, "messages": messages, "max_tokens": 2}
    response = await client.post("/v1/chat/completions", json=body)
    assert response.status_code == status
    if status == 400:
        param = "messages[1].tool_calls[0].function.arguments"
        assert str((await error_of(response))[1]).startswith(param)


@pytest.mark.parametrize(
    "extra",
    [
        {"text": {"format": {"type": "json_schema", "schema": {"type": "object"}}}},
        {"text": {"format": {"type": "json_schema", "name": "a", "schema": 1}}},
        {"reasoning": {"summary": "\x00"}},
    ],
)
async def test_what_a_response_repeats_may_be_anything_that_was_taken(
    client: httpx.AsyncClient, extra: dict[str, Any]
) -> None:
    body = {"model": "fake", "input": "then", "max_output_tokens": 2, **extra}
    assert (await client.post("/v1/responses", json=body)).status_code == 200


async def test_a_number_that_is_none_is_refused(client: httpx.AsyncClient) -> None:
    content = orjson.dumps(CHAT)[:-1] + b',"temperature":NaN}'
    response = await client.post("/v1/chat/completions", content=content, headers=JSON)
    assert (await error_of(response))[:3] == (400, None, "json_invalid")


async def test_what_cannot_be_encoded_is_counted_nowhere(
    gateway: Gateway, client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A value that no check has named yet."""

    def unencodable(*_: object) -> None:
        raise ValueError("Value out of range: 2147483648")

    monkeypatch.setattr("gateway.target_link.submit_message", unencodable)
    response = await client.post("/v1/completions", json=COMPLETION)
    assert (await error_of(response))[::2] == (400, "request_unencodable")
    assert (gateway.pool.num_live, gateway.pool.links[0].num_reserved_tokens) == (0, 0)


async def test_a_link_that_fails_is_logged_and_dialled_again(
    gateway: Gateway,
    client: httpx.AsyncClient,
    target: FakeTarget,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("a message nobody foresaw")

    (link,) = gateway.pool.links
    with monkeypatch.context() as patched:
        patched.setattr("gateway.target_link.events_from_response", broken)
        epoch = link.epoch
        response = await client.post("/v1/completions", json={**COMPLETION, "stream": False})
        assert response.status_code == 503
    await eventually(lambda: link.epoch > epoch and link.state is TargetState.SERVING)
    assert "a message nobody foresaw" in caplog.text
    assert (await client.post("/v1/completions", json=COMPLETION)).status_code == 200


async def test_a_request_that_cannot_be_told_of_a_loss_leaves_the_link_alive(
    make_gateway: MakeGateway,
    target: FakeTarget,
    second_target: FakeTarget,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gateway = await make_gateway(target, second_target)

    def broken(*_: object) -> None:
        raise RuntimeError("it cannot be placed")

    link = gateway.pool.links[0]
    link.submit(_generation(), broken)
    epoch = link.epoch
    await target.break_sessions()
    await eventually(lambda: link.epoch > epoch)
    assert link.num_live == 0


def _generation() -> Generation:
    return Generation("r", [1], SamplingParams(), StopParams(1))


async def test_after_a_bug_the_connection_says_that_it_closes(
    gateway: Gateway, serve: Callable[[Gateway], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def explode(*args: object) -> None:
        raise RuntimeError("secret detail")

    monkeypatch.setattr("gateway.event_stream.chat_completion", explode)
    async with httpx.AsyncClient(base_url=serve(gateway)) as client:
        response = await client.post("/v1/chat/completions", json={**CHAT, "max_tokens": 2})
        assert (response.status_code, response.headers["connection"]) == (500, "close")
        assert (await client.get("/health")).status_code == 200
