"""One streamed chat request over HTTP, timed as a client sees it."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import httpx


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """What to ask.

    Attributes:
        speculation: whether the target may verify candidates; the answer is the same without.
    """

    prompt: str
    max_tokens: int
    temperature: float = 0.0
    seed: int = 0
    speculation: bool = True

    def body(self, model: str) -> dict[str, Any]:
        return {
            "model": model,
            "messages": [{"role": "user", "content": self.prompt}],
            "max_tokens": self.max_tokens,
            "temperature": self.temperature,
            "seed": self.seed,
            "stream": True,
            "stream_options": {"include_usage": True},
            "speculation": {"disable": not self.speculation},
        }


@dataclass(frozen=True, slots=True)
class ChatResult:
    """What came back, with times in seconds since the request was sent.

    Attributes:
        chunk_times: arrival of every chunk that carried text; one chunk may hold several tokens.
        num_tokens: generated tokens, from the usage chunk.
        rounds: target steps that drew a token; None where the server does not report it.
    """

    text: str
    duration_s: float
    chunk_times: tuple[float, ...]
    num_tokens: int
    rounds: int | None

    def delayed(self, late_s: float) -> ChatResult:
        """Returns the result as seen from `late_s` before the request was sent."""
        times = tuple(each + late_s for each in self.chunk_times)
        return replace(self, chunk_times=times, duration_s=self.duration_s + late_s)

    @property
    def first_token_s(self) -> float:
        return self.chunk_times[0]

    @property
    def gaps_s(self) -> tuple[float, ...]:
        return tuple(b - a for a, b in zip(self.chunk_times, self.chunk_times[1:], strict=False))


class ChatFailed(Exception):
    """The server refused the request or broke the stream off."""


async def served_model(http: httpx.AsyncClient) -> str:
    """Returns the id of the first served model."""
    answer = await http.get("/models")
    answer.raise_for_status()
    return str(answer.json()["data"][0]["id"])


async def stream_chat(http: httpx.AsyncClient, model: str, request: ChatRequest) -> ChatResult:
    """Sends one request and reads its stream to the end.

    Raises:
        ChatFailed: on an HTTP status other than 200, an error event or a stream without usage.
    """
    started = time.perf_counter()
    text: list[str] = []
    times: list[float] = []
    usage: Mapping[str, Any] = {}
    async with http.stream("POST", "/chat/completions", json=request.body(model)) as response:
        if response.status_code != httpx.codes.OK:
            raise ChatFailed(f"HTTP {response.status_code}: {(await response.aread()).decode()}")
        async for event in _events(response):
            if "error" in event:
                raise ChatFailed(f"error event: {event['error']}")
            piece = _text(event)
            if piece:
                text.append(piece)
                times.append(time.perf_counter() - started)
            usage = event.get("usage") or usage
    if not usage or not times:
        raise ChatFailed("the stream ended without text or usage")
    return ChatResult(
        text="".join(text),
        duration_s=time.perf_counter() - started,
        chunk_times=tuple(times),
        num_tokens=usage["completion_tokens"],
        rounds=_rounds(usage),
    )


async def _events(response: httpx.Response) -> AsyncIterator[dict[str, Any]]:
    """Yields the JSON of each server-sent event up to `[DONE]`."""
    async for line in response.aiter_lines():
        data = line.removeprefix("data: ")
        if data == "[DONE]":
            return
        if data != line:
            yield json.loads(data)


def _text(event: Mapping[str, Any]) -> str:
    return "".join(choice["delta"].get("content") or "" for choice in event.get("choices", ()))


def _rounds(usage: Mapping[str, Any]) -> int | None:
    """Returns how many target steps made the tokens: each commits accepted ones and one more."""
    num_accepted = usage.get("completion_tokens_details", {}).get("accepted_prediction_tokens")
    if num_accepted is None:
        return None
    return max(1, int(usage["completion_tokens"]) - int(num_accepted))
