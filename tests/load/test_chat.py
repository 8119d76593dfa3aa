"""The chat client of the load and bench programs, against canned streams."""

from __future__ import annotations

import httpx
import pytest

from tests.load.chat import ChatFailed, ChatRequest, stream_chat

REQUEST = ChatRequest("Hello", max_tokens=8)


def _http(status: int, body: str) -> httpx.AsyncClient:
    transport = httpx.MockTransport(lambda request: httpx.Response(status, text=body))
    return httpx.AsyncClient(base_url="http://gateway/v1", transport=transport)


async def test_text_tokens_and_rounds_are_read_from_the_stream() -> None:
    body = (
        'data: {"choices": [{"delta": {"role": "assistant"}}]}\n\n'
        'data: {"choices": [{"delta": {"content": "Good "}}]}\n\n'
        'data: {"choices": [{"delta": {"content": "day"}}]}\n\n'
        'data: {"choices": [], "usage": {"completion_tokens": 7,'
        ' "completion_tokens_details": {"accepted_prediction_tokens": 4}}}\n\n'
        "data: [DONE]\n\n"
    )
    async with _http(200, body) as http:
        result = await stream_chat(http, "demo", REQUEST)
    assert result.text == "Good day"
    assert len(result.chunk_times) == 2
    assert (result.num_tokens, result.rounds) == (7, 3)


async def test_an_error_event_fails_the_request() -> None:
    body = 'data: {"error": {"message": "the engine failed"}}\n\n'
    async with _http(200, body) as http:
        with pytest.raises(ChatFailed, match="the engine failed"):
            await stream_chat(http, "demo", REQUEST)


async def test_a_stream_without_usage_fails_the_request() -> None:
    body = 'data: {"choices": [{"delta": {"content": "Good"}}]}\n\ndata: [DONE]\n\n'
    async with _http(200, body) as http:
        with pytest.raises(ChatFailed, match="without text or usage"):
            await stream_chat(http, "demo", REQUEST)


async def test_a_refusal_is_reported_with_its_status() -> None:
    async with _http(429, "queue full") as http:
        with pytest.raises(ChatFailed, match="429: queue full"):
            await stream_chat(http, "demo", REQUEST)
