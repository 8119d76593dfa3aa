"""Calls and thinking in Anthropic's shapes, from tokens of a scripted target."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import httpx
import pytest

from gateway.model_text import ModelText
from gateway.output.style import OutputStyle, ToolCallParser
from shared.rpc.requests import grammar_from_message
from tests.gateway.driving import MESSAGES, MakeGateway, post, say
from tests.gateway.messages.test_messages import named_events
from tests.gateway.thinking_model import OUTPUT, SCHEMA
from tests.helpers.fake_target import FakeTarget

TOOLS = [{"name": "weather", "input_schema": SCHEMA}, {"name": "now"}]
BODY = {"model": "fake", "max_tokens": 400, "messages": MESSAGES, "tools": TOOLS}
THINKING = {"thinking": {"type": "enabled", "budget_tokens": 1024}}


async def _post(
    make_gateway: MakeGateway, target: FakeTarget, text: ModelText, body: dict[str, Any]
) -> httpx.Response:
    return await post(await make_gateway(target, text=text), "/v1/messages", body)


def _blocks(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Puts the blocks of a stream together, as Anthropic's client does."""
    blocks: list[dict[str, Any]] = []
    open_index: int | None = None
    for event in events:
        if event["type"] == "content_block_start":
            assert (open_index, event["index"]) == (None, len(blocks))
            open_index = event["index"]
            blocks.append({**event["content_block"], "json": ""})
        elif event["type"] == "content_block_delta":
            assert event["index"] == open_index
            delta, block = event["delta"], blocks[-1]
            key = {"text_delta": "text", "thinking_delta": "thinking"}.get(delta["type"], "json")
            block[key] += delta["partial_json" if key == "json" else key]
        elif event["type"] == "content_block_stop":
            assert event["index"] == open_index
            open_index = None
    assert open_index is None
    for block in blocks:
        written = block.pop("json")
        if block["type"] == "tool_use":
            block["input"] = json.loads(written)
    return blocks


def _shapes(blocks: list[dict[str, Any]]) -> list[Any]:
    return [block.get("text", block.get("thinking", block.get("input"))) for block in blocks]


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        (f'{{"city": {10**30}}}', {"city": 10**30}),
        ("[1]", {}),
        ("null", {}),
        ('{"city": NaN}', {}),
        ('"\\ud800"', {}),
    ],
)
async def test_a_calls_input_is_an_object_as_the_model_wrote_it(
    make_gateway: MakeGateway, target: FakeTarget, thinking_text: ModelText, arguments: str,
    shown: dict[str, Any],
) -> None:  # fmt: skip
    call = f'<tool_call>{{"name": "weather", "arguments": {arguments}}}</tool_call>'
    await say(target, thinking_text.tokenizer, call)
    message = (await _post(make_gateway, target, thinking_text, BODY)).json()
    assert [block["input"] for block in message["content"]] == [shown]


@pytest.mark.parametrize("per_step", [1, 4])
async def test_blocks_are_the_same_whole_and_streamed(
    make_gateway: MakeGateway, target: FakeTarget, thinking_text: ModelText, per_step: int
) -> None:
    await say(target, thinking_text.tokenizer, OUTPUT, per_step=per_step)
    body = {**BODY, **THINKING}
    whole = (await _post(make_gateway, target, thinking_text, body)).json()
    assert [block["type"] for block in whole["content"]] == [
        "thinking", "text", "tool_use", "tool_use",
    ]  # fmt: skip
    assert _shapes(whole["content"]) == ["the fox", "I ask.", {"city": 'Bern "{'}, {}]
    assert [block.get("name") for block in whole["content"][2:]] == ["weather", "now"]
    assert whole["stop_reason"] == "tool_use"
    response = await _post(make_gateway, target, thinking_text, {**body, "stream": True})
    events = named_events(response.content)
    assert _shapes(_blocks(events)) == _shapes(whole["content"])
    assert events[-2]["delta"]["stop_reason"] == "tool_use"


async def test_thoughts_are_not_shown_unless_asked_for(
    make_gateway: MakeGateway, target: FakeTarget, thinking_text: ModelText
) -> None:
    await say(target, thinking_text.tokenizer, OUTPUT)
    whole = (await _post(make_gateway, target, thinking_text, BODY)).json()
    assert whole["content"][0]["type"] == "text"
    prompt = list(target.submits[-1].request.prompt_token_ids)
    assert thinking_text.tokenizer.decode(prompt).startswith("False")


async def test_calls_results_and_thoughts_reach_the_template(
    make_gateway: MakeGateway, target: FakeTarget, thinking_text: ModelText
) -> None:
    messages = [
        {"role": "user", "content": "a"},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm", "signature": ""},
                {"type": "text", "text": "b"},
                {"type": "tool_use", "id": "t1", "name": "weather", "input": {"city": "Bern"}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "t1", "content": "rain"},
                {"type": "text", "text": "and?"},
            ],
        },
    ]
    await _post(
        make_gateway, target, thinking_text, {**BODY, "messages": messages, "max_tokens": 1}
    )
    prompt = list(target.submits[-1].request.prompt_token_ids)
    assert thinking_text.tokenizer.decode(prompt, skip_special_tokens=False) == (
        "False<|user|>a<|assistant|>b#hm(t1 weather Bern)<|tool|>rain=t1<|user|>and?2"
    )


@pytest.mark.parametrize(
    ("choice", "num_tags", "is_single"),
    [
        ({"type": "any"}, 2, False),
        ({"type": "any", "disable_parallel_tool_use": True}, 2, True),
        ({"type": "tool", "name": "now"}, 1, True),
    ],
)
async def test_choice_becomes_a_grammar(
    make_gateway: MakeGateway,
    target: FakeTarget,
    thinking_text: ModelText,
    choice: dict[str, Any],
    num_tags: int,
    is_single: bool,
) -> None:
    text = replace(thinking_text, style=OutputStyle(ToolCallParser.HERMES))
    await _post(make_gateway, target, text, {**BODY, "tool_choice": choice, "max_tokens": 1})
    grammar = grammar_from_message(target.submits[-1].request.grammar)
    tag = json.loads(grammar.text)["format"]
    assert (len(tag["tags"]), tag["stop_after_first"]) == (num_tags, is_single)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_model_without_thoughts_is_asked_for_them_in_vain(
    make_gateway: MakeGateway, target: FakeTarget, text: ModelText, stream: bool
) -> None:
    response = await _post(make_gateway, target, text, {**BODY, **THINKING, "stream": stream})
    assert response.status_code == 200
    assert response.headers["x-outrider-notice"].startswith("thinking has no effect")
