"""What gateway tests do again and again."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import httpx
import orjson

from gateway.app import Gateway, create_app
from shared.text import Tokenizer
from tests.helpers.fake_target import FakeTarget, Steps

MESSAGES: Any = [{"role": "user", "content": "then"}]
PROMPT = "<|user|>then<|end|><|assistant|>"
CHAT = {"model": "fake", "messages": MESSAGES}

MakeGateway = Callable[..., Awaitable[Gateway]]


async def eventually(predicate: Callable[[], bool]) -> None:
    """Waits until `predicate` holds; fails after a minute."""
    deadline_s = time.monotonic() + 60.0
    while not predicate():
        assert time.monotonic() < deadline_s, "it never happened"
        await asyncio.sleep(0.002)


def http_client(gateway: Gateway) -> httpx.AsyncClient:
    """Returns a client that calls the app without a socket; a stream comes as one body."""
    transport = httpx.ASGITransport(create_app(gateway), raise_app_exceptions=False)
    return httpx.AsyncClient(transport=transport, base_url="http://gateway", timeout=60.0)


async def post(gateway: Gateway, path: str, body: dict[str, Any]) -> httpx.Response:
    """Sends one request, without a socket."""
    async with http_client(gateway) as client:
        return await client.post(path, json=body)


async def ids_of(tokenizer: Tokenizer, text: str) -> list[int]:
    return await tokenizer.encode(text, add_special_tokens=False)


def in_steps(token_ids: Sequence[int], per_step: int) -> Steps:
    return [token_ids[i : i + per_step] for i in range(0, len(token_ids), per_step)]


async def say(
    target: FakeTarget, tokenizer: Tokenizer, text: str, *, per_step: int = 3
) -> list[int]:
    """Makes the target answer `text` and end; returns the tokens, end token included."""
    token_ids = [*await ids_of(tokenizer, text), 0]
    target.reply = lambda request: in_steps(token_ids, per_step)
    return token_ids


def events(body: bytes) -> list[Any]:
    """Returns the events of a stream; the text `[DONE]` for the last one."""
    assert body.endswith(b"\n\n")
    lines = [block for block in body.split(b"\n\n") if block]
    assert all(line.startswith(b"data: ") for line in lines)
    payloads = [line.removeprefix(b"data: ") for line in lines]
    return ["[DONE]" if p == b"[DONE]" else orjson.loads(p) for p in payloads]


async def error_of(response: httpx.Response) -> tuple[int, str | None, str, str]:
    """Returns status, param, code and message of an error in OpenAI's shape."""
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return response.status_code, error["param"], error["code"], error["message"]
