"""Requests as coding agents send them, in the shapes recorded of Claude Code and Codex."""

from __future__ import annotations

from typing import Any

import pytest

from gateway.model_text import ModelText
from tests.gateway.driving import MakeGateway, error_of, events, http_client, post, say
from tests.gateway.messages.test_messages import anthropic_error
from tests.gateway.responses.test_responses import typed_events
from tests.gateway.thinking_model import SCHEMA
from tests.helpers.fake_target import FakeTarget

CLAUDE_CODE: dict[str, Any] = {
    "model": "fake",
    "max_tokens": 2000,
    "stream": True,
    "system": [{"type": "text", "text": "You are.", "cache_control": {"type": "ephemeral"}}],
    "messages": [
        {
            "role": "user",
            "content": [{"type": "text", "text": "then", "cache_control": {"type": "ephemeral"}}],
        },
        {"role": "system", "content": "Agents: none."},
    ],
    "tools": [{"name": "Write", "description": "writes", "input_schema": SCHEMA}],
    "metadata": {"user_id": "{}"},
    "thinking": {"type": "adaptive"},
    "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    "output_config": {"effort": "high"},
}
CODEX: dict[str, Any] = {
    "model": "fake",
    "stream": True,
    "store": False,
    "input": [
        {
            "type": "message",
            "id": "msg_1",
            "role": "developer",
            "content": [{"type": "input_text", "text": "You are."}],
        },
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "then"}]},
    ],
    "tools": [
        {"type": "function", "name": "exec_command", "strict": False, "parameters": SCHEMA},
        {
            "type": "namespace",
            "name": "agents",
            "description": "Sub-agents.",
            "tools": [{"type": "function", "name": "spawn", "parameters": SCHEMA}],
        },
        {"type": "web_search", "external_web_access": True},
    ],
    "tool_choice": "auto",
    "parallel_tool_calls": True,
    "reasoning": {"summary": "auto"},
    "include": ["reasoning.encrypted_content"],
    "prompt_cache_key": "1",
    "client_metadata": {"turn_id": "1"},
}
SYSTEM = {"role": "system", "content": [{"type": "text", "text": "You are."}]}
READ = {"name": "read_file", "description": "reads", "parameters": SCHEMA}
HISTORY: list[Any] = [
    SYSTEM,
    {"role": "user", "content": [{"type": "text", "text": "then"}]},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {
                "id": "call_1",
                "type": "function",
                "function": {"name": "read_file", "arguments": '{"city": "Bern"}'},
            }
        ],
    },
    {"role": "tool", "tool_call_id": "call_1", "content": [{"type": "text", "text": "ok"}]},
]
EDITORS: dict[str, dict[str, Any]] = {
    "Zed": {
        "model": "fake",
        "messages": HISTORY,
        "stream": True,
        "stream_options": {"include_usage": True},
        "max_completion_tokens": 2000,
        "stop": [],
        "temperature": 1.0,
        "tool_choice": "auto",
        "parallel_tool_calls": False,
        "prompt_cache_key": "thread-1",
        "tools": [{"type": "function", "function": READ}],
    },
    # Tools as in chats and as in responses, in one list.
    "Cursor": {
        "model": "fake",
        "messages": HISTORY,
        "stream": True,
        "stream_options": {"include_usage": True},
        "temperature": 1,
        "user": "1",
        "tools": [
            {"type": "function", "function": READ},
            {"type": "function", **READ, "name": "grep", "strict": False},
        ],
        "tool_choice": "auto",
    },
}
BETAS = {"anthropic-beta": "claude-code-20250219,context-management-2025-06-27", "x-app": "cli"}


async def test_claude_code_gets_its_message(
    make_gateway: MakeGateway, target: FakeTarget, text: ModelText, thinking_text: ModelText
) -> None:
    call = '<tool_call>{"name": "Write", "arguments": {"city": "Bern"}}</tool_call>'
    for model in (text, thinking_text):
        await say(target, model.tokenizer, call)
        async with http_client(await make_gateway(target, text=model)) as client:
            url = "/v1/messages?beta=true"
            streamed = await client.post(url, json=CLAUDE_CODE, headers=BETAS)
            whole = await client.post(url, json={**CLAUDE_CODE, "stream": False})
            counting = {**CLAUDE_CODE}
            for name in ("max_tokens", "stream", "metadata", "output_config"):
                del counting[name]
            counted = await client.post("/v1/messages/count_tokens", json=counting)
        assert streamed.status_code == 200
        assert streamed.content.count(b'"input_json_delta"') > 1  # as the model writes them
        assert whole.json()["stop_reason"] == "tool_use"
        assert counted.json()["input_tokens"] == whole.json()["usage"]["input_tokens"]


@pytest.mark.parametrize(
    ("keep", "kept"),
    [
        ("all", ["one", "two"]),
        (None, ["two"]),
        ({"type": "thinking_turns", "value": 1}, ["two"]),
        ({"type": "thinking_turns", "value": 2}, ["one", "two"]),
    ],
)
async def test_thoughts_of_older_turns_are_cleared(
    make_gateway: MakeGateway,
    target: FakeTarget,
    thinking_text: ModelText,
    keep: Any,
    kept: list[str],
) -> None:
    turns: list[Any] = []
    for thought in ("one", "two"):
        blocks = [{"type": "thinking", "thinking": thought}, {"type": "text", "text": "x"}]
        turns += [{"role": "user", "content": "u"}, {"role": "assistant", "content": blocks}]
    turns.append({"role": "user", "content": "u"})
    edit = {"type": "clear_thinking_20251015", "keep": keep}
    body = {**CLAUDE_CODE, "messages": turns, "context_management": {"edits": [edit]}}
    await post(await make_gateway(target, text=thinking_text), "/v1/messages", body)
    prompt = thinking_text.tokenizer.decode(target.submits[0].request.prompt_token_ids)
    assert [thought for thought in ("one", "two") if f"#{thought}" in prompt] == kept


async def test_edits_that_shorten_prompts_are_told_to_be_off(
    make_gateway: MakeGateway, target: FakeTarget, text: ModelText
) -> None:
    gateway = await make_gateway(target, text=text)
    edit: dict[str, Any] = {"type": "clear_tool_uses_20250919", "trigger": {"value": 1}}
    body = {**CLAUDE_CODE, "context_management": {"edits": [edit]}}
    response = await post(gateway, "/v1/messages", body)
    assert response.status_code == 200
    assert "edits[0] is never applied" in response.headers["x-outrider-notice"]
    for wrong, name in (
        ({"type": "clear_everything"}, "edits[0].type"),
        ({"type": "clear_thinking_20251015", "keep": "few"}, "edits[0].keep"),
    ):
        body = {**CLAUDE_CODE, "context_management": {"edits": [wrong]}}
        response = await post(gateway, "/v1/messages", body)
        assert response.status_code == 400
        assert name in anthropic_error(response)[2]


@pytest.mark.parametrize("editor", EDITORS)
async def test_editors_get_their_chunks(
    make_gateway: MakeGateway, target: FakeTarget, text: ModelText, editor: str
) -> None:
    await say(
        target, text.tokenizer, '<tool_call>{"name": "read_file", "arguments": {}}</tool_call>'
    )
    body = EDITORS[editor]
    response = await post(await make_gateway(target, text=text), "/v1/chat/completions", body)
    assert response.status_code == 200, response.text
    *_, finish, last = [each for each in events(response.content) if each != "[DONE]"]
    assert finish["choices"][0]["finish_reason"] == "tool_calls"
    assert last["usage"]["completion_tokens"] > 0
    prompt = text.tokenizer.decode(target.submits[0].request.prompt_token_ids)
    assert all(name in prompt for name in ("read_file", "ok"))
    assert ("grep" in prompt) == (editor == "Cursor")


async def test_codex_gets_its_response(
    make_gateway: MakeGateway, target: FakeTarget, text: ModelText
) -> None:
    call = '<tool_call>{"name": "agents__spawn", "arguments": {"city": "Bern"}}</tool_call>'
    await say(target, text.tokenizer, call)
    gateway = await make_gateway(target, text=text)
    streamed = await post(gateway, "/v1/responses", CODEX)
    notice = streamed.headers["x-outrider-notice"]
    assert notice == "tools[2] is left out: tools of type 'web_search' are not run here"
    events = typed_events(streamed.content)
    whole = (await post(gateway, "/v1/responses", {**CODEX, "stream": False})).json()
    for response in (events[-1].response.model_dump(exclude_unset=True), whole):
        (item,) = response["output"]
        assert (item["name"], item["namespace"]) == ("spawn", "agents")
        assert response["reasoning"] == {"effort": None, "summary": "auto"}
    (done,) = [e for e in events if e.type == "response.function_call_arguments.done"]
    assert (done.name, done.arguments) == ("spawn", '{"city": "Bern"}')


async def test_a_call_in_a_namespace_goes_back_by_the_name_the_model_knows(
    make_gateway: MakeGateway, target: FakeTarget, thinking_text: ModelText
) -> None:
    call = {"type": "function_call", "call_id": "c", "name": "spawn", "namespace": "agents",
            "arguments": '{"city": "Bern"}'}  # fmt: skip
    result = {"type": "function_call_output", "call_id": "c", "output": "ok"}
    body = {**CODEX, "input": [*CODEX["input"], call, result]}
    await post(await make_gateway(target, text=thinking_text), "/v1/responses", body)
    prompt = thinking_text.tokenizer.decode(target.submits[0].request.prompt_token_ids)
    assert "(c agents__spawn Bern)" in prompt


async def test_tools_of_unknown_types_are_refused_by_name(
    make_gateway: MakeGateway, target: FakeTarget, text: ModelText
) -> None:
    gateway = await make_gateway(target, text=text)
    inner = [{"type": "namespace", "name": "b", "tools": []}]
    for tool, name, code in (
        ({"type": "frobnicate"}, "tools[0].type", "not_implemented"),
        (
            {"type": "namespace", "name": "a", "tools": inner},
            "tools[0].tools[0].type",
            "not_implemented",
        ),
        ({"type": "function", "parameters": {}}, "tools[0].name", "field_invalid"),
        ({"type": "namespace", "tools": []}, "tools[0].name", "field_invalid"),
    ):
        response = await post(gateway, "/v1/responses", {**CODEX, "tools": [tool]})
        assert (await error_of(response))[:3] == (400, name, code)
