"""One mode measured: every prompt once, at a fixed concurrency."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

import httpx

from tests.load.chat import ChatRequest, ChatResult, stream_chat
from tests.load.figures import percentile


@dataclass(frozen=True, slots=True)
class Pass:
    """All prompts answered once; results in prompt order."""

    results: tuple[ChatResult, ...]
    duration_s: float

    @property
    def texts(self) -> tuple[str, ...]:
        return tuple(result.text for result in self.results)

    @property
    def tokens_per_s(self) -> float:
        return sum(result.num_tokens for result in self.results) / self.duration_s

    @property
    def accepted_length(self) -> float | None:
        """Tokens a target step commits, the bonus token included; None if not reported."""
        rounds = [result.rounds for result in self.results if result.rounds is not None]
        if len(rounds) < len(self.results):
            return None
        return sum(result.num_tokens for result in self.results) / sum(rounds)


@dataclass(frozen=True, slots=True)
class Measurement:
    """Medians over the passes of one mode.

    Attributes:
        accepted_length: tokens a target step commits, the bonus token included.
        num_identical: answers that equal the plain ones of the first pass, to the letter.
    """

    mode: str
    tokens_per_s: float
    accepted_length: float | None
    first_token_ms: float
    num_identical: int
    num_prompts: int


async def answer_all(
    http: httpx.AsyncClient, model: str, requests: Sequence[ChatRequest], concurrency: int
) -> Pass:
    """Sends every request once, `concurrency` at a time."""
    places = asyncio.Semaphore(concurrency)

    async def answer(request: ChatRequest) -> ChatResult:
        async with places:
            return await stream_chat(http, model, request)

    started = time.perf_counter()
    results = await asyncio.gather(*(answer(request) for request in requests))
    return Pass(tuple(results), time.perf_counter() - started)


def summarise(mode: str, passes: Sequence[Pass], plain_texts: Sequence[str]) -> Measurement:
    """Reduces the passes of one mode to medians."""
    lengths = [p.accepted_length for p in passes if p.accepted_length is not None]
    first_tokens = [result.first_token_s for p in passes for result in p.results]
    pairs = zip(passes[0].texts, plain_texts, strict=True)
    return Measurement(
        mode=mode,
        tokens_per_s=statistics.median(p.tokens_per_s for p in passes),
        accepted_length=statistics.median(lengths) if lengths else None,
        first_token_ms=1000 * percentile(first_tokens, 50),
        num_identical=sum(text == plain for text, plain in pairs),
        num_prompts=len(plain_texts),
    )
