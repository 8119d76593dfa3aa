"""`/v1/responses`, as the openai package reads it."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest
from openai import AsyncOpenAI
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from gateway.app import Gateway
from shared.text import Tokenizer
from tests.gateway.driving import PROMPT, error_of, eventually, ids_of, say
from tests.helpers.fake_target import FakeTarget

EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
BODY = {"model": "fake", "input": "then"}


def typed_events(body: bytes) -> list[Any]:
    """Returns the events of a stream, each checked against the openai package's type."""
    blocks = body.removesuffix(b"\n\n").split(b"\n\n")
    parsed = [EVENT.validate_json(block.split(b"data: ")[1]) for block in blocks]
    names = [block.split(b"\n")[0] for block in blocks]
    assert names == [b"event: " + event.type.encode() for event in parsed]
    assert [event.sequence_number for event in parsed] == list(range(len(parsed)))
    return parsed


async def test_text_in_text_out(
    openai_client: AsyncOpenAI, target: FakeTarget, tokenizer: Tokenizer
) -> None:
    output = await say(target, tokenizer, "the fox")
    target.num_cached_tokens = 2
    answer = await openai_client.responses.create(
        model="fake", input="then", metadata={"a": "b"}, temperature=0.5, top_p=0.75
    )
    assert (answer.output_text, answer.status) == ("the fox", "completed")
    assert (answer.temperature, answer.top_p, answer.metadata) == (0.5, 0.75, {"a": "b"})
    assert answer.usage is not None
    prompt = await ids_of(tokenizer, PROMPT)
    assert list(target.submits[0].request.prompt_token_ids) == prompt
    assert answer.usage.input_tokens == len(prompt)
    assert answer.usage.input_tokens_details.cached_tokens == 2
    assert answer.usage.output_tokens == len(output)
    metrics = (answer.model_extra or {})["metrics"]
    assert metrics["speculative_decoding"]["num_spec_steps"] > 0


async def test_a_conversation_and_instructions_become_one_chat(
    client: httpx.AsyncClient, target: FakeTarget, tokenizer: Tokenizer
) -> None:
    items = [
        {"role": "user", "content": "a"},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "b"}]},
        {"role": "user", "content": [{"type": "input_text", "text": "c"}]},
    ]
    body = {"model": "fake", "input": items, "instructions": "be nice", "max_output_tokens": 1}
    response = await client.post("/v1/responses", json=body)
    Response.model_validate(response.json())
    chat = (
        "<|system|>be nice<|end|><|user|>a<|end|><|assistant|>b<|end|><|user|>c<|end|><|assistant|>"
    )
    assert list(target.submits[0].request.prompt_token_ids) == await ids_of(tokenizer, chat)


async def test_a_response_cut_by_its_limit_is_incomplete(openai_client: AsyncOpenAI) -> None:
    answer = await openai_client.responses.create(model="fake", input="then", max_output_tokens=2)
    assert answer.status == "incomplete"
    assert answer.incomplete_details is not None
    assert answer.incomplete_details.reason == "max_output_tokens"
    assert answer.max_output_tokens == 2


async def test_a_stream_has_openais_events_in_order(
    client: httpx.AsyncClient, target: FakeTarget, tokenizer: Tokenizer
) -> None:
    await say(target, tokenizer, "the quick é fox", per_step=1)
    response = await client.post("/v1/responses", json={**BODY, "stream": True})
    parsed = typed_events(response.content)
    kinds = [event.type.removeprefix("response.") for event in parsed]
    assert kinds[:4] == ["created", "in_progress", "output_item.added", "content_part.added"]
    assert kinds[-4:] == ["output_text.done", "content_part.done", "output_item.done", "completed"]
    assert set(kinds[4:-4]) == {"output_text.delta"}
    assert "".join(event.delta for event in parsed[4:-4]) == "the quick é fox"
    first, last = parsed[0].response, parsed[-1].response
    assert (first.id, first.status, first.output) == (last.id, "in_progress", [])
    assert (last.status, last.output_text) == ("completed", "the quick é fox")
    assert parsed[-2].item == last.output[0]
    whole = (await client.post("/v1/responses", json=BODY)).json()
    assert last.usage.model_dump() == Response.model_validate(whole).usage.model_dump()


async def test_the_openai_client_follows_a_stream_to_its_end(
    openai_client: AsyncOpenAI, target: FakeTarget, tokenizer: Tokenizer
) -> None:
    await say(target, tokenizer, "the fox")
    async with openai_client.responses.stream(model="fake", input="then") as stream:
        final = await stream.get_final_response()
    assert final.output_text == "the fox"


async def test_a_stream_cut_by_its_limit_ends_incomplete(client: httpx.AsyncClient) -> None:
    body = {**BODY, "stream": True, "max_output_tokens": 1}
    last = typed_events((await client.post("/v1/responses", json=body)).content)[-1]
    assert last.type == "response.incomplete"
    assert last.response.incomplete_details.reason == "max_output_tokens"


@pytest.mark.parametrize(
    "asked", [{"top_logprobs": 2}, {"include": ["message.output_text.logprobs"]}]
)
async def test_log_probabilities_come_when_asked_for(
    client: httpx.AsyncClient, target: FakeTarget, tokenizer: Tokenizer, asked: dict[str, Any]
) -> None:
    output = await say(target, tokenizer, "the fox")
    whole = Response.model_validate(
        (await client.post("/v1/responses", json={**BODY, **asked})).json()
    )
    item: Any = whole.output[0]
    scores = item.content[0].logprobs
    assert [score.logprob for score in scores] == [-0.5] * len(output)
    assert {len(score.top_logprobs) for score in scores} == {asked.get("top_logprobs", 0)}
    response = await client.post("/v1/responses", json={**BODY, **asked, "stream": True})
    parsed = typed_events(response.content)
    assert parsed[-1].response.output[0].content == item.content


async def test_a_stream_that_fails_ends_with_an_error_event(
    client: httpx.AsyncClient, gateway: Gateway, target: FakeTarget
) -> None:
    target.hold_after = 1
    request = asyncio.create_task(client.post("/v1/responses", json={**BODY, "stream": True}))
    await eventually(lambda: gateway.pool.links[0].num_tokens > 0)
    await target.break_sessions()
    parsed = typed_events((await request).content)
    assert (parsed[-1].type, parsed[-1].code) == ("error", "target_lost")
    assert "response.completed" not in [event.type for event in parsed]


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"input": []}, "input"),
        ({"input": 5}, "input"),
        ({"input": [{"role": "robot", "content": "x"}]}, "input[0].role"),
        ({"input": [{"type": "function_call_output"}]}, "input[0].call_id"),
        ({"input": [{"type": "web_search_call"}]}, "input[0].type"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
            "input[0].content[0].type",
        ),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"max_output_tokens": 2**64}, "max_output_tokens"),
        ({"reasoning": {"effort": "utmost"}}, "reasoning.effort"),
        ({"metadata": {"n": 2**64}}, "metadata.n"),
        ({"temperature": 3}, "temperature"),
        ({"top_logprobs": 99}, "top_logprobs"),
        ({"include": ["everything"]}, "include"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"store": True}, "store"),
        ({"background": True}, "background"),
        ({"prompt": {"id": "p"}}, "prompt"),
        ({"tools": [{"type": "custom"}]}, "tools[0].type"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"text": {"format": {"type": "grammar"}}}, "text.format.type"),
        ({"text": {"tone": "low"}, "lora_path": "x"}, "lora_path"),
        ({"truncation": "auto"}, "truncation"),
    ],
)
async def test_what_cannot_be_served_is_refused_by_name(
    client: httpx.AsyncClient, target: FakeTarget, change: dict[str, Any], param: str
) -> None:
    for stream in (False, True):
        response = await client.post("/v1/responses", json={**BODY, **change, "stream": stream})
        assert (await error_of(response))[:2] == (400, param)
    assert target.submits == []


async def test_what_asks_for_nothing_is_accepted(client: httpx.AsyncClient) -> None:
    extras = {
        "store": False,
        "tools": [],
        "tool_choice": "auto",
        "text": {"format": {"type": "text"}},
        "include": ["reasoning.encrypted_content", "file_search_call.results"],
        "reasoning": {"effort": "low", "summary": "auto"},
        "truncation": "disabled",
        "user": "u",
    }
    assert (await client.post("/v1/responses", json={**BODY, **extras})).status_code == 200


@pytest.mark.parametrize("method", ["GET", "DELETE", "POST"])
async def test_responses_are_not_stored(client: httpx.AsyncClient, method: str) -> None:
    for path in ("/v1/responses/resp_1", "/v1/responses/resp_1/cancel"):
        response = await client.request(method, path)
        assert (await error_of(response))[::2] == (404, "response_not_stored")
