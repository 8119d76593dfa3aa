"""Long requests: bounded before they are worked on, and off the event loop while they are."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import httpx
import pydantic
import pytest
from tokenizers import Tokenizer as FastTokenizer

from gateway.app import Gateway
from gateway.prompts import off_loop
from gateway.schema import MAX_BIASED_TOKENS, ChatCompletionRequest, CompletionRequest
from shared.errors import DeadlineExceeded
from shared.text import Tokenizer
from tests.gateway.driving import CHAT, MESSAGES, error_of
from tests.gateway.test_failures import COMPLETION


async def _ticks_while(work: Any) -> int:
    """Returns how often the loop came round while something was awaited."""
    task, num_ticks = asyncio.ensure_future(work), 0
    while not task.done():
        await asyncio.sleep(0.001)
        num_ticks += 1
    await task
    return num_ticks


async def test_tokenizing_lets_the_event_loop_run(tokenizer: Tokenizer) -> None:
    for length in (300_000, 900_000, 2_700_000):  # a quick machine has few ticks, or a busy one
        if await _ticks_while(tokenizer.encode("a" * length, add_special_tokens=False)) > 10:
            return
    pytest.fail("it stood still")


async def test_a_prompt_above_the_context_is_not_tokenized(
    client: httpx.AsyncClient, gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    def explode(*_: object) -> None:
        raise AssertionError("it was tokenized")

    monkeypatch.setattr(Tokenizer, "_encode", explode)
    long = "a" * 200_000
    chat = {**CHAT, "messages": [{"role": "user", "content": long}]}
    for url, body in (
        ("/v1/completions", {**COMPLETION, "prompt": long}),
        ("/v1/chat/completions", chat),
        ("/generate", {"text": long}),
    ):
        response = await client.post(url, json=body)
        status, _, code, message = await error_of(response)
        assert (status, code) == (400, "context_length_exceeded")
        assert "at least" in message
        assert "4,095" in message


async def test_a_longer_list_of_ids_than_the_context_is_not_looked_at(
    client: httpx.AsyncClient,
) -> None:
    response = await client.post("/v1/completions", json={**COMPLETION, "prompt": [9999] * 4096})
    assert (await error_of(response))[2] == "context_length_exceeded"


async def test_counting_is_not_bounded_by_the_context(client: httpx.AsyncClient) -> None:
    body = {"model": "fake", "messages": [{"role": "user", "content": "the " * 5000}]}
    counted = (await client.post("/v1/messages/count_tokens", json=body)).json()
    assert counted["input_tokens"] > 4096


async def test_tokenizing_has_a_deadline(
    model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fast = FastTokenizer.from_file(str(model_folder / "tokenizer.json"))
    tokenizer, release = Tokenizer(fast, timeout_s=0.01), threading.Event()
    monkeypatch.setattr(tokenizer, "_encode", lambda *_: release.wait())
    try:
        with pytest.raises(DeadlineExceeded, match=r"10,000 characters.* 0\.01 s"):
            await tokenizer.encode("x" * 10_000, add_special_tokens=False)
    finally:
        release.set()


async def test_other_work_has_a_deadline() -> None:
    release = threading.Event()
    try:
        with pytest.raises(DeadlineExceeded, match=r"messages takes longer than 0\.01 s"):
            await off_loop("messages", release.wait, 0.01)
    finally:
        release.set()


async def test_many_messages_are_rendered_off_the_loop(
    client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: set[str] = set()

    def render(*_: object) -> str:
        threads.add(threading.current_thread().name)
        return "the"

    monkeypatch.setattr("gateway.planner.chat_text", render)
    for num_messages in (1, 100):
        body = {"messages": MESSAGES * num_messages}
        assert (await client.post("/tokenize", json=body)).status_code == 200
    assert len(threads) == 2


async def test_long_lists_of_tokens_become_text_off_the_loop(
    client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: set[str] = set()
    decode = Tokenizer.decode

    def noted(tokenizer: Tokenizer, *arguments: Any, **options: Any) -> str:
        threads.add(threading.current_thread().name)
        return decode(tokenizer, *arguments, **options)

    monkeypatch.setattr(Tokenizer, "decode", noted)
    for num_tokens in (2, 20_000):
        answer = await client.post("/detokenize", json={"tokens": [5] * num_tokens})
        assert len(answer.json()["text"]) == num_tokens
    assert len(threads) == 2
    answer = await client.post("/detokenize", json={"tokens": [5] * 20_000 + [9999]})
    assert (await error_of(answer))[:2] == (400, "tokens")


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        (CompletionRequest, {"prompt": [{}] * 1000}),
        (CompletionRequest, {"prompt": "a", "stop": [1] * 1000, "stop_token_ids": ["x"] * 1000}),
        (ChatCompletionRequest, {"messages": [{}] * 1000}),
        (ChatCompletionRequest, {"messages": [{"role": "user", "content": [1] * 1000}]}),
    ],
)
def test_a_long_wrong_list_has_few_errors(
    kind: type[pydantic.BaseModel], body: dict[str, Any]
) -> None:
    with pytest.raises(pydantic.ValidationError) as raised:
        kind.model_validate(body)
    assert raised.value.error_count() <= 5


async def test_a_bias_of_too_many_tokens_is_refused_by_name(client: httpx.AsyncClient) -> None:
    bias = dict.fromkeys(range(MAX_BIASED_TOKENS + 1), "wrong")
    response = await client.post("/v1/completions", json={**COMPLETION, "logit_bias": bias})
    status, param, _, message = await error_of(response)
    assert (status, param) == (400, "logit_bias")
    assert "65,536" in message
