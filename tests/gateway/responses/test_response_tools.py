"""Calls and reasoning as items of a response, from tokens of a scripted target."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from gateway.model_text import ModelText
from tests.gateway.driving import MakeGateway, error_of, post, say
from tests.gateway.responses.test_responses import typed_events
from tests.gateway.thinking_model import ARGUMENTS, OUTPUT, SCHEMA
from tests.helpers.fake_target import FakeTarget

TOOLS = [
    {"type": "function", "name": "weather", "parameters": SCHEMA, "strict": False},
    {"type": "function", "name": "now", "description": "the time"},
]
BODY = {"model": "fake", "input": "then", "tools": TOOLS}


async def _post(
    make_gateway: MakeGateway, target: FakeTarget, text: ModelText, body: dict[str, Any]
) -> httpx.Response:
    return await post(await make_gateway(target, text=text), "/v1/responses", body)


def _shapes(items: list[Any]) -> list[Any]:
    return [
        item["arguments"] if item["type"] == "function_call" else item["content"][0]["text"]
        for item in items
    ]


@pytest.mark.parametrize("per_step", [1, 4])
async def test_items_are_the_same_whole_and_streamed(
    make_gateway: MakeGateway, target: FakeTarget, thinking_text: ModelText, per_step: int
) -> None:
    await say(target, thinking_text.tokenizer, OUTPUT, per_step=per_step)
    whole = (await _post(make_gateway, target, thinking_text, BODY)).json()
    kinds = ["reasoning", "message", "function_call", "function_call"]
    assert [item["type"] for item in whole["output"]] == kinds
    assert _shapes(whole["output"]) == ["the fox", "I ask.", ARGUMENTS, "{}"]
    assert [item["name"] for item in whole["output"][2:]] == ["weather", "now"]
    assert {item["status"] for item in whole["output"]} == {"completed"}
    assert [tool["name"] for tool in whole["tools"]] == ["weather", "now"]
    assert whole["usage"]["output_tokens_details"]["reasoning_tokens"] > 0
    response = await _post(make_gateway, target, thinking_text, {**BODY, "stream": True})
    events = typed_events(response.content)
    done = [each.item for each in events if each.type == "response.output_item.done"]
    assert [item.type for item in done] == kinds
    final = events[-1].response.model_dump(mode="json")["output"]
    assert _shapes(final) == _shapes(whole["output"])
    assert [item["id"] for item in final] == [item.id for item in done]
    for index, shape in enumerate(_shapes(final)):
        deltas = [
            each.delta
            for each in events
            if each.type.endswith(".delta") and each.output_index == index
        ]
        assert "".join(deltas) == shape
        added = [
            each for each in events
            if each.type == "response.output_item.added" and each.output_index == index
        ]  # fmt: skip
        assert len(added) == 1


async def test_calls_outputs_and_reasoning_reach_the_template(
    make_gateway: MakeGateway, target: FakeTarget, thinking_text: ModelText
) -> None:
    items = [
        {"role": "user", "content": "a"},
        {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": ARGUMENTS},
        {"type": "function_call", "call_id": "c2", "name": "now", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": "rain"},
        {"type": "function_call_output", "call_id": "c2", "output": "noon"},
    ]
    body = {**BODY, "input": items, "max_output_tokens": 1}
    await _post(make_gateway, target, thinking_text, body)
    prompt = list(target.submits[-1].request.prompt_token_ids)
    assert thinking_text.tokenizer.decode(prompt, skip_special_tokens=False) == (
        '<|user|>a<|assistant|>#hm(c1 weather Bern "{)(c2 now )<|tool|>rain=c1<|tool|>noon=c22'
    )


async def test_cut_answer_leaves_its_last_item_incomplete(
    make_gateway: MakeGateway, target: FakeTarget, thinking_text: ModelText
) -> None:
    await say(target, thinking_text.tokenizer, OUTPUT)
    body = {**BODY, "max_output_tokens": 30}
    answer = (await _post(make_gateway, target, thinking_text, body)).json()
    assert answer["status"] == "incomplete"
    *whole, last = answer["output"]
    assert last["status"] == "incomplete"
    assert all(item["status"] == "completed" for item in whole)


async def test_choice_is_repeated_and_held_to(
    make_gateway: MakeGateway, target: FakeTarget, thinking_text: ModelText
) -> None:
    choice = {"type": "function", "name": "now"}
    body = {**BODY, "tool_choice": choice, "max_output_tokens": 1}
    answer = (await _post(make_gateway, target, thinking_text, body)).json()
    assert answer["tool_choice"] == choice
    assert target.submits[-1].request.HasField("grammar")


async def test_tools_of_other_kinds_are_refused(
    make_gateway: MakeGateway, target: FakeTarget, thinking_text: ModelText
) -> None:
    body = {**BODY, "tools": [{"type": "custom", "name": "patch"}]}
    response = await _post(make_gateway, target, thinking_text, body)
    assert (await error_of(response))[:3] == (400, "tools[0].type", "not_implemented")
