"""Streams as bytes: chunks that parse, clients that leave or do not read, targets that break."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable

import httpx
import openai
import orjson
import pytest
from openai import AsyncOpenAI
from openai.types import Completion
from openai.types.chat import ChatCompletionChunk

from gateway.app import Gateway, create_app
from gateway.http_server import BodyWriter
from gateway.settings import GatewaySettings
from shared.errors import Unavailable
from shared.text import Tokenizer
from tests.gateway.driving import CHAT, MESSAGES, MakeGateway, events, eventually, ids_of, say
from tests.helpers.fake_target import FakeTarget

FULL = {
    "n": 2,
    "stream": True,
    "return_token_ids": True,
    "stream_options": {"include_usage": True, "continuous_usage_stats": True},
}


async def test_every_chat_chunk_is_the_openai_packages_type(
    client: httpx.AsyncClient, target: FakeTarget, tokenizer: Tokenizer
) -> None:
    await say(target, tokenizer, 'a "quoted"\n🦊')
    body = {**CHAT, **FULL, "logprobs": True, "top_logprobs": 2}
    response = await client.post("/v1/chat/completions", json=body)
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    *chunks, done = events(response.content)
    assert done == "[DONE]"
    for chunk in chunks:
        ChatCompletionChunk.model_validate(chunk, strict=True)


async def test_every_completion_chunk_is_the_openai_packages_type_but_for_the_open_end(
    client: httpx.AsyncClient, target: FakeTarget, tokenizer: Tokenizer
) -> None:
    await say(target, tokenizer, 'a "quoted"\n🦊')
    body = {"model": "fake", "prompt": ["x", "y"], **FULL, "logprobs": 2, "echo": False}
    *chunks, done = events((await client.post("/v1/completions", json=body)).content)
    assert done == "[DONE]"
    for chunk in chunks:
        for choice in chunk["choices"]:
            # The package has no type for a completion chunk: its reason is never null.
            choice["finish_reason"] = choice["finish_reason"] or "stop"
        Completion.model_validate(chunk, strict=True)


async def test_a_client_that_leaves_a_stream_cancels_each_choice_once(
    openai_client: AsyncOpenAI, target: FakeTarget, gateway: Gateway
) -> None:
    target.hold_after = 0
    stream = await openai_client.chat.completions.create(
        model="fake", messages=MESSAGES, stream=True, n=3
    )
    await anext(stream)
    await stream.close()
    await target.until(lambda: len(target.cancelled) == 3)
    assert sorted(target.cancelled) == [submit.request_id for submit in target.submits]
    await eventually(lambda: gateway.lifecycle.num_open == 0)
    assert gateway.pool.num_live == 0


async def test_a_client_that_leaves_before_the_end_of_a_whole_answer_cancels_it(
    openai_client: AsyncOpenAI, target: FakeTarget, gateway: Gateway
) -> None:
    target.hold_after = 0
    request = asyncio.create_task(
        openai_client.chat.completions.create(model="fake", messages=MESSAGES)
    )
    await target.until(lambda: len(target.submits) == 1)
    request.cancel()
    await target.until(lambda: target.cancelled == [1])
    await eventually(lambda: gateway.lifecycle.num_open == 0)


async def test_an_answer_that_ended_is_not_cancelled(
    openai_client: AsyncOpenAI, target: FakeTarget, tokenizer: Tokenizer
) -> None:
    await say(target, tokenizer, "fox")
    stream = await openai_client.chat.completions.create(
        model="fake", messages=MESSAGES, stream=True
    )
    async for _ in stream:
        pass
    await stream.close()
    # A second request as a fence: cancels and submits travel in order.
    await openai_client.chat.completions.create(model="fake", messages=MESSAGES)
    assert target.cancelled == []


async def test_a_target_lost_mid_stream_is_an_error_event_without_done(
    gateway: Gateway, serve: Callable[[Gateway], str], target: FakeTarget
) -> None:
    target.hold_after = 1
    body = {**CHAT, "stream": True}
    lines: list[str] = []
    async with httpx.AsyncClient(base_url=serve(gateway), timeout=60.0) as client:
        async with client.stream("POST", "/v1/chat/completions", json=body) as response:
            assert response.status_code == 200
            async for line in response.aiter_lines():
                lines.append(line)
                if '"content":"' in line and '"content":""' not in line:
                    await target.break_sessions()
    last = orjson.loads([line for line in lines if line][-1].removeprefix("data: "))
    assert last["error"]["code"] == "target_lost"
    assert target.address in last["error"]["message"]
    assert not any("[DONE]" in line for line in lines)


async def test_the_openai_client_raises_on_an_error_event(
    openai_client: AsyncOpenAI, target: FakeTarget
) -> None:
    target.hold_after = 1
    stream = await openai_client.chat.completions.create(
        model="fake", messages=MESSAGES, stream=True
    )
    await anext(stream)
    await target.break_sessions()
    with pytest.raises(openai.APIError, match="was lost"):
        async for _ in stream:
            pass


async def test_a_client_that_does_not_read_is_cancelled_at_the_bound(
    make_gateway: MakeGateway, serve: Callable[[Gateway], str], target: FakeTarget
) -> None:
    target.max_context_tokens = 10_000_000
    # The kernel takes megabytes for a client before it makes the gateway wait: large steps.
    target.reply = lambda request: itertools.repeat([5] * 1000)
    gateway = await make_gateway(target, settings=GatewaySettings(max_unread_tokens=5000))
    host, port = serve(gateway).removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port), limit=1024)
    body = orjson.dumps({"model": "fake", "prompt": [5], "max_tokens": 9_000_000, "stream": True})
    head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
    await target.until(lambda: target.cancelled == [1])
    # It may read on: what was sent is whole, then it is told.
    assert b"client_too_slow" in await _read_all(reader)
    writer.close()
    await writer.wait_closed()


async def test_what_a_slow_client_left_unread_comes_as_one_chunk(
    openai_client: AsyncOpenAI, target: FakeTarget, gateway: Gateway, tokenizer: Tokenizer
) -> None:
    token_ids = await ids_of(tokenizer, "there and then the other thing")
    target.reply = lambda request: [[token_id] for token_id in (*token_ids, 0)]
    body = {**CHAT, "stream": True}
    scope_sent: list[bytes] = []
    blocked = asyncio.Event()

    async def slow_send(message: dict[str, object]) -> None:
        scope_sent.append(bytes(message.get("body", b"")))  # type: ignore[call-overload]
        if len(scope_sent) == 2:  # the headers, then the first bytes
            await blocked.wait()

    request = asyncio.create_task(_call(gateway, body, slow_send))
    await eventually(lambda: len(scope_sent) == 2 and gateway.pool.num_live == 0)
    blocked.set()
    await request
    assert len(scope_sent) <= 4
    sent = events(b"".join(scope_sent))
    text = "".join(c["choices"][0]["delta"].get("content", "") for c in sent[:-1])
    assert text == "there and then the other thing"


@pytest.mark.parametrize("stop", [None, "other"])
async def test_tokens_are_written_as_they_arrive_without_waking_the_task(
    openai_client: AsyncOpenAI,
    target: FakeTarget,
    gateway: Gateway,
    tokenizer: Tokenizer,
    monkeypatch: pytest.MonkeyPatch,
    stop: str | None,
) -> None:
    at_once: list[bytes] = []
    write = BodyWriter.write

    def written(writer: BodyWriter, part: bytes) -> None:
        at_once.append(part)
        write(writer, part)

    monkeypatch.setattr(BodyWriter, "write", written)
    token_ids = await ids_of(tokenizer, "there and then the other thing")
    target.reply = lambda request: [[token_id] for token_id in (*token_ids, 0)]
    stream = await openai_client.chat.completions.create(
        model="fake", messages=MESSAGES, stream=True, stop=stop
    )
    choices = [chunk.choices[0] async for chunk in stream]
    text = "".join(choice.delta.content or "" for choice in choices)
    assert text == ("there and then the " if stop else "there and then the other thing")
    assert choices[-1].finish_reason == "stop"
    assert at_once
    await eventually(lambda: gateway.lifecycle.num_open == 0)


async def test_what_fails_while_it_is_written_at_once_ends_the_stream_with_an_error(
    openai_client: AsyncOpenAI,
    target: FakeTarget,
    gateway: Gateway,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def write(writer: BodyWriter, part: bytes) -> None:
        raise Unavailable("no more", reason="GONE")

    monkeypatch.setattr(BodyWriter, "write", write)
    target.reply = lambda request: itertools.repeat([5])
    stream = await openai_client.chat.completions.create(
        model="fake", messages=MESSAGES, stream=True, max_tokens=3000
    )
    with pytest.raises(openai.APIError, match="no more"):
        async for _ in stream:
            pass
    await eventually(lambda: gateway.pool.num_live == 0)


async def _read_all(reader: asyncio.StreamReader) -> bytes:
    """Reads to the end of a chunked body."""
    content = b""
    while not content.endswith(b"0\r\n\r\n"):
        content = content[-100:] + await reader.read(2**16)
    return content


async def _call(gateway: Gateway, body: object, send: Callable[..., object]) -> None:
    """Calls the app as a server would, with `send` in the test's hands."""
    content = orjson.dumps(body)
    messages = [{"type": "http.request", "body": content, "more_body": False}]

    async def receive() -> dict[str, object]:
        if messages:
            return messages.pop()
        await asyncio.Event().wait()
        raise AssertionError

    scope = {
        "type": "http",
        "method": "POST",
        "path": "/v1/chat/completions",
        "raw_path": b"/v1/chat/completions",
        "query_string": b"",
        "root_path": "",
        "scheme": "http",
        "http_version": "1.1",
        "headers": [(b"content-type", b"application/json")],
        "client": ("test", 1),
        "server": ("test", 2),
    }
    await create_app(gateway)(scope, receive, send)
