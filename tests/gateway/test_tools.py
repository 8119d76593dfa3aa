"""Calls of tools and reasoning on the chat interface, from tokens of a scripted target."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai import AsyncOpenAI
from tokenizers import AddedToken
from tokenizers import Tokenizer as FastTokenizer

from gateway.app import Gateway
from gateway.model_text import ChatTemplate, ModelText
from gateway.output.style import OutputStyle, ReasoningParser, ToolCallParser
from shared.grammar import GrammarKind
from shared.rpc.requests import grammar_from_message
from shared.text import Tokenizer
from tests.gateway.driving import CHAT, MakeGateway, error_of, events, http_client, post, say
from tests.helpers.fake_target import FakeTarget

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS: Any = [
    {
        "type": "function",
        "function": {"name": "weather", "description": "of a city", "parameters": SCHEMA},
    },
    {"type": "function", "function": {"name": "now"}},
]
CITY = 'Zürich 🌦 "{\\'
ARGUMENTS = '{"city": "Zürich 🌦 \\"{\\\\"}'
CALL = f'<tool_call>\n{{"name": "weather", "arguments": {ARGUMENTS}}}\n</tool_call>'
NOW = '<tool_call>{"name": "now"}</tool_call>'
BODY = {**CHAT, "tools": TOOLS}
TEMPLATE = (
    "{% if tools %}[{% for t in tools %}{{ t.function.name }} {% endfor %}]{% endif %}"
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}"
    "{% for c in m.tool_calls %}({{ c.id }} {{ c.function.name }} "
    "{{ c.function.arguments.city }}){% endfor %}"
    "{% if m.tool_call_id %}={{ m.tool_call_id }}{% endif %}"
    "{% if m.reasoning_content %}#{{ m.reasoning_content }}{% endif %}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
MakeClient = Callable[..., Any]


@pytest.fixture
def style() -> OutputStyle:
    return OutputStyle(ToolCallParser.HERMES, ReasoningParser.NONE)


@pytest.fixture
def tool_text(text: ModelText, style: OutputStyle) -> ModelText:
    return replace(text, style=style, template=ChatTemplate(TEMPLATE, {}))


async def _gateway(
    make_gateway: MakeGateway, target: FakeTarget, text: ModelText, **style: Any
) -> Gateway:
    return await make_gateway(target, text=replace(text, style=replace(text.style, **style)))


async def _chat(gateway: Gateway, body: dict[str, Any]) -> httpx.Response:
    async with http_client(gateway) as client:
        return await client.post("/v1/chat/completions", json=body)


def _prompt(target: FakeTarget, text: ModelText) -> str:
    ids = list(target.submits[-1].request.prompt_token_ids)
    return text.tokenizer.decode(ids, skip_special_tokens=False)


def _tag(target: FakeTarget) -> Any:
    grammar = grammar_from_message(target.submits[-1].request.grammar)
    assert grammar.kind is GrammarKind.STRUCTURAL_TAG
    return json.loads(grammar.text)["format"]


async def test_calls_of_a_whole_answer(
    make_gateway: MakeGateway,
    serve: Callable[[Gateway], str],
    target: FakeTarget,
    tool_text: ModelText,
) -> None:
    await say(target, tool_text.tokenizer, f"I ask.\n{CALL}\n{NOW}")
    gateway = await make_gateway(target, text=tool_text)
    plain = httpx.AsyncClient(transport=httpx.AsyncHTTPTransport(verify=False))
    async with AsyncOpenAI(
        base_url=f"{serve(gateway)}/v1",
        api_key="-",
        max_retries=0,
        timeout=60.0,
        http_client=plain,
    ) as client:
        answer = await client.chat.completions.create(**BODY)
    [choice] = answer.choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == "I ask.\n"
    assert choice.message.tool_calls is not None
    found = [(call.function.name, call.function.arguments) for call in choice.message.tool_calls]  # type: ignore[union-attr]
    assert found == [("weather", ARGUMENTS), ("now", "{}")]
    assert len({call.id for call in choice.message.tool_calls}) == 2


async def test_a_client_that_takes_one_call_gets_the_first(
    make_gateway: MakeGateway, target: FakeTarget, tool_text: ModelText
) -> None:
    await say(target, tool_text.tokenizer, f"I ask.\n{CALL}\n{NOW}")
    gateway = await make_gateway(target, text=tool_text)
    body = {**BODY, "parallel_tool_calls": False}
    whole = (await post(gateway, "/v1/chat/completions", body)).json()["choices"][0]
    assert [call["function"]["name"] for call in whole["message"]["tool_calls"]] == ["weather"]
    assert whole["finish_reason"] == "tool_calls"
    streamed = events(
        (await post(gateway, "/v1/chat/completions", {**body, "stream": True})).content
    )
    deltas = [chunk["choices"][0]["delta"] for chunk in streamed[:-1]]
    calls = [call for delta in deltas for call in delta.get("tool_calls") or ()]
    assert {call["index"] for call in calls} == {0}


@pytest.mark.parametrize("per_step", [1, 2, 3, 5, 100])
async def test_calls_of_a_stream_join_to_those_of_the_whole(
    make_gateway: MakeGateway, target: FakeTarget, tool_text: ModelText, per_step: int
) -> None:
    await say(target, tool_text.tokenizer, f"I ask.\n{CALL}{NOW}", per_step=per_step)
    gateway = await make_gateway(target, text=tool_text)
    response = await _chat(gateway, {**BODY, "stream": True, "n": 2})
    chunks = [chunk["choices"][0] for chunk in events(response.content)[:-1]]
    for index in (0, 1):
        own = [chunk for chunk in chunks if chunk["index"] == index]
        content = "".join(chunk["delta"].get("content") or "" for chunk in own)
        assert content == "I ask.\n"
        calls: dict[int, dict[str, str]] = {}
        for chunk in own:
            for call in chunk["delta"].get("tool_calls", ()):
                known = calls.setdefault(call["index"], {"arguments": ""})
                if "id" in call:
                    assert known == {"arguments": ""}, "the name comes first, and once"
                    known |= {"id": call["id"], "name": call["function"]["name"]}
                known["arguments"] += call["function"]["arguments"]
        assert [(c["name"], c["arguments"]) for c in calls.values()] == [
            ("weather", ARGUMENTS), ("now", "{}"),
        ]  # fmt: skip
        assert [chunk["finish_reason"] for chunk in own if chunk["finish_reason"]] == ["tool_calls"]
    if per_step == 1:
        pieces = [c for c in chunks if c["index"] == 0 and c["delta"].get("tool_calls")]
        assert len(pieces) > 10, "arguments stream"


async def test_answer_without_a_call_is_an_ordinary_one(
    make_gateway: MakeGateway, target: FakeTarget, tool_text: ModelText
) -> None:
    await say(target, tool_text.tokenizer, "  the <tool_box> fox")
    gateway = await make_gateway(target, text=tool_text)
    [choice] = (await _chat(gateway, BODY)).json()["choices"]
    assert choice["message"]["content"] == "  the <tool_box> fox"
    assert "tool_calls" not in choice["message"]
    assert choice["finish_reason"] == "stop"


async def test_tools_and_results_reach_the_template(
    make_gateway: MakeGateway, target: FakeTarget, tool_text: ModelText
) -> None:
    gateway = await make_gateway(target, text=tool_text)
    call = {
        "id": "c1", "type": "function",
        "function": {"name": "weather", "arguments": '{"city": "Bern"}'},
    }  # fmt: skip
    messages = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": None, "tool_calls": [call], "reasoning": "hm"},
        {"role": "tool", "tool_call_id": "c1", "content": "rain"},
    ]
    await _chat(gateway, {**BODY, "messages": messages, "max_tokens": 1})
    assert _prompt(target, tool_text) == (
        "[weather now ]<|user|>a<|end|><|assistant|>(c1 weather Bern)#hm<|end|>"
        "<|tool|>rain=c1<|end|><|assistant|>"
    )
    await _chat(gateway, {**BODY, "tool_choice": "none", "max_tokens": 1})
    assert _prompt(target, tool_text).startswith("<|user|>")


async def test_template_without_tools_gets_them_as_a_system_message(
    make_gateway: MakeGateway, target: FakeTarget, text: ModelText, style: OutputStyle
) -> None:
    gateway = await make_gateway(target, text=replace(text, style=style))
    await _chat(gateway, {**BODY, "max_tokens": 1})
    prompt = _prompt(target, text)
    assert prompt.startswith("<|system|>You may call functions.")
    assert '"name": "weather", "description": "of a city"' in prompt


async def test_required_call_has_a_grammar(
    make_gateway: MakeGateway, target: FakeTarget, tool_text: ModelText
) -> None:
    gateway = await make_gateway(target, text=tool_text)
    await _chat(gateway, {**BODY, "tool_choice": "required", "max_tokens": 1})
    tag = _tag(target)
    assert [each["begin"] for each in tag["tags"]] == [
        f'<tool_call>\n{{"name": "{name}", "arguments": ' for name in ("weather", "now")
    ]
    assert tag["tags"][0]["content"]["json_schema"] == SCHEMA
    assert (tag["at_least_one"], tag["stop_after_first"]) == (True, False)
    named = {"type": "function", "function": {"name": "now"}}
    await _chat(gateway, {**BODY, "tool_choice": named, "max_tokens": 1})
    assert len(_tag(target)["tags"]) == 1
    assert _tag(target)["stop_after_first"]
    one = {**BODY, "tool_choice": "required", "parallel_tool_calls": False, "max_tokens": 1}
    await _chat(gateway, one)
    assert _tag(target)["stop_after_first"]
    await _chat(gateway, {**BODY, "max_tokens": 1})
    assert not target.submits[-1].request.HasField("grammar")


async def test_strict_tool_is_held_to_its_schema_when_the_model_calls(
    make_gateway: MakeGateway, target: FakeTarget, tool_text: ModelText
) -> None:
    strict = {"type": "function", "function": {"name": "f", "parameters": SCHEMA, "strict": True}}
    gateway = await make_gateway(target, text=tool_text)
    await _chat(gateway, {**BODY, "tools": [strict], "max_tokens": 1})
    assert _tag(target)["triggers"] == ["<tool_call>"]


async def test_a_call_or_the_format_where_the_model_is_free_to_call(
    make_gateway: MakeGateway, target: FakeTarget, tool_text: ModelText
) -> None:
    gateway = await make_gateway(target, text=tool_text)
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}
    await _chat(gateway, {**BODY, "response_format": form, "max_tokens": 1})
    tag = _tag(target)
    assert tag["type"] == "or"
    calls, answer = tag["elements"]
    assert calls["type"] == "tags_with_separator"
    assert answer == {"type": "json_schema", "json_schema": SCHEMA}


async def test_a_required_call_goes_before_the_format(
    make_gateway: MakeGateway, target: FakeTarget, tool_text: ModelText
) -> None:
    gateway = await make_gateway(target, text=tool_text)
    body = {**BODY, "tool_choice": "required", "regex": "a", "max_tokens": 1}
    response = await _chat(gateway, body)
    assert _tag(target)["type"] == "tags_with_separator"
    assert "no effect" in response.headers["x-outrider-notice"]


async def test_only_allowed_tools_are_told_and_called(
    make_gateway: MakeGateway, target: FakeTarget, tool_text: ModelText
) -> None:
    gateway = await make_gateway(target, text=tool_text)
    now = [{"type": "function", "function": {"name": "now"}}]
    choice = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": now}}
    await _chat(gateway, {**BODY, "tool_choice": choice, "max_tokens": 1})
    assert _prompt(target, tool_text).startswith("[now ]")
    assert len(_tag(target)["tags"]) == 1
    choice["allowed_tools"]["mode"] = "auto"  # type: ignore[index]
    await _chat(gateway, {**BODY, "tool_choice": choice, "max_tokens": 1})
    assert not target.submits[-1].request.HasField("grammar")
    body = {
        "model": "fake",
        "input": "then",
        "max_output_tokens": 1,
        "tools": [{"type": "function", "name": name} for name in ("now", "weather")],
        "tool_choice": {"type": "allowed_tools", "mode": "required", "tools": [
            {"type": "function", "name": "now"}]},
    }  # fmt: skip
    response = await post(gateway, "/v1/responses", body)
    assert response.json()["tool_choice"]["mode"] == "required"
    assert len(_tag(target)["tags"]) == 1


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"tool_choice": "required"}, "tool_choice", "tools_missing"),
        ({"tools": [TOOLS[0], TOOLS[0]]}, "tools", "tool_name_invalid"),
        (
            {"tools": [{"type": "function", "function": {"name": "a b"}}]},
            "tools",
            "tool_name_invalid",
        ),
        (
            {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "x"}}},
            "tool_choice",
            "tool_unknown",
        ),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type", "field_invalid"),
        ({"tools": TOOLS, "tool_choice": "any"}, "tool_choice", "field_invalid"),
        (
            {"tools": TOOLS, "ebnf": 'root ::= "a"'},
            "tools",
            "constraint_ambiguous",
        ),
        (
            {
                "tools": TOOLS,
                "tool_choice": {
                    "type": "allowed_tools",
                    "allowed_tools": {"tools": [{"type": "function", "function": {"name": "x"}}]},
                },
            },
            "tool_choice.allowed_tools.tools",
            "tool_unknown",
        ),
    ],
)
async def test_tools_that_cannot_be_taken_are_refused_by_name(
    make_gateway: MakeGateway,
    target: FakeTarget,
    tool_text: ModelText,
    fields: dict[str, Any],
    param: str | None,
    code: str,
) -> None:
    gateway = await make_gateway(target, text=tool_text)
    response = await _chat(gateway, {**CHAT, **fields})
    status, named, found, _ = await error_of(response)
    assert (status, found) == (400, code)
    assert param is None or named == param
    assert target.submits == []


async def test_gateway_without_a_parser_refuses_tools(
    make_gateway: MakeGateway, target: FakeTarget, tool_text: ModelText
) -> None:
    gateway = await _gateway(make_gateway, target, tool_text, tools=ToolCallParser.NONE)
    assert (await error_of(await _chat(gateway, BODY)))[:3] == (400, "tools", "tools_off")


async def test_arguments_that_are_no_json_are_refused(
    make_gateway: MakeGateway, target: FakeTarget, tool_text: ModelText
) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "f(1)"}}
    messages = [{"role": "assistant", "tool_calls": [call]}]
    gateway = await make_gateway(target, text=tool_text)
    response = await _chat(gateway, {**CHAT, "messages": messages})
    field = "messages[0].tool_calls[0].function.arguments"
    assert (await error_of(response))[:2] == (400, field)


@pytest.mark.parametrize("per_step", [1, 3])
async def test_reasoning_comes_in_both_spellings(
    make_gateway: MakeGateway, target: FakeTarget, tool_text: ModelText, per_step: int
) -> None:
    output = f"<think>\nthe fox</think>\n\nSo.{CALL}"
    await say(target, tool_text.tokenizer, output, per_step=per_step)
    gateway = await _gateway(make_gateway, target, tool_text, reasoning=ReasoningParser.QWEN3)
    answer = (await _chat(gateway, BODY)).json()
    message = answer["choices"][0]["message"]
    assert message["reasoning_content"] == message["reasoning"] == "the fox"
    assert message["content"] == "So."
    assert message["tool_calls"][0]["function"]["arguments"] == ARGUMENTS
    num_reasoning = answer["usage"]["completion_tokens_details"]["reasoning_tokens"]
    assert 0 < num_reasoning < answer["usage"]["completion_tokens"] / 2
    response = await _chat(gateway, {**BODY, "stream": True})
    deltas = [chunk["choices"][0]["delta"] for chunk in events(response.content)[:-1]]
    assert "".join(delta.get("reasoning_content", "") for delta in deltas) == "the fox"
    assert "".join(delta.get("reasoning", "") for delta in deltas) == "the fox"
    assert "".join(delta.get("content") or "" for delta in deltas) == "So."
    silent = (await _chat(gateway, {**BODY, "include_reasoning": False})).json()
    assert "reasoning" not in silent["choices"][0]["message"]


async def test_rounds_tell_calls_and_reasoning_as_they_were_generated(
    make_gateway: MakeGateway, target: FakeTarget, tool_text: ModelText
) -> None:
    output = f"<think>\nthe fox</think>\n\nSo.{CALL}"
    await say(target, tool_text.tokenizer, output)
    gateway = await _gateway(make_gateway, target, tool_text, reasoning=ReasoningParser.QWEN3)
    body = {**BODY, "stream": True, "speculation": {"trace": True}}
    chunks = events((await _chat(gateway, body)).content)[:-1]
    choices = [chunk["choices"][0] for chunk in chunks]
    rounds = [r for each in choices for r in each.get("speculation", {"rounds": []})["rounds"]]
    assert "".join(token["text"] for each in rounds for token in each["tokens"]) == output


async def test_schema_holds_for_the_answer_and_not_for_the_reasoning(
    make_gateway: MakeGateway, target: FakeTarget, tool_text: ModelText
) -> None:
    gateway = await _gateway(make_gateway, target, tool_text, reasoning=ReasoningParser.QWEN3)
    given = {"type": "json_schema", "json_schema": {"schema": SCHEMA}}
    await _chat(gateway, {**CHAT, "response_format": given, "max_tokens": 1})
    thought, answer = _tag(target)["elements"]
    assert answer == {"type": "json_schema", "json_schema": SCHEMA}
    assert thought["elements"][0]["begin"] == "<think>"
    assert thought["elements"][-1] == answer


MARKED = {
    ToolCallParser.DEEPSEEK: (
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n"
        f"```json\n{ARGUMENTS}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        (
            *("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>"),
            *("<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>"),
        ),
    ),
    ToolCallParser.MISTRAL: (
        f'[TOOL_CALLS][{{"name": "weather", "arguments": {ARGUMENTS}}}]', ("[TOOL_CALLS]",),
    ),
    ToolCallParser.LLAMA3: (
        f'<|python_tag|>{{"name": "weather", "parameters": {ARGUMENTS}}}', ("<|python_tag|>",),
    ),
    ToolCallParser.HARMONY: (
        f"<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{ARGUMENTS}",
        ("<|channel|>", "<|constrain|>", "<|message|>"),
    ),
    ToolCallParser.KIMI_K2: (
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0"
        f"<|tool_call_argument_begin|>{ARGUMENTS}<|tool_call_end|><|tool_calls_section_end|>",
        (
            *("<|tool_calls_section_begin|>", "<|tool_call_begin|>", "<|tool_call_end|>"),
            *("<|tool_call_argument_begin|>", "<|tool_calls_section_end|>"),
        ),
    ),
    ToolCallParser.GLM45: (
        f"<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>{CITY}</arg_value>\n</tool_call>",
        ("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
    ),
    ToolCallParser.QWEN3_CODER: (
        f"<tool_call>\n<function=weather>\n<parameter=city>\n{CITY}\n</parameter>\n</function>\n"
        "</tool_call>",
        ("<tool_call>", "</tool_call>"),
    ),
    ToolCallParser.MINIMAX_M2: (
        f'<minimax:tool_call><invoke name="weather"><parameter name="city">{CITY}</parameter>'
        "</invoke></minimax:tool_call>",
        ("<minimax:tool_call>", "</minimax:tool_call>"),
    ),
    ToolCallParser.PYTHONIC: (
        f"<|python_start|>[weather(city={CITY!r})]<|python_end|>",
        ("<|python_start|>", "<|python_end|>"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("family", MARKED)
async def test_special_tokens_that_a_format_is_made_of_are_read_and_others_are_not_shown(
    make_gateway: MakeGateway,
    target: FakeTarget,
    tool_text: ModelText,
    model_folder: Path,
    family: ToolCallParser,
) -> None:
    output, marks = MARKED[family]
    fast = FastTokenizer.from_file(str(model_folder / "tokenizer.json"))
    fast.add_special_tokens([AddedToken(mark, special=True) for mark in (*marks, "<|other|>")])
    tokenizer = Tokenizer(fast)
    text = replace(tool_text, tokenizer=tokenizer, style=OutputStyle(family))
    await say(target, tokenizer, f"{output}<|other|>", per_step=2)
    gateway = await make_gateway(target, text=text)
    [choice] = (await _chat(gateway, BODY)).json()["choices"]
    [call] = choice["message"]["tool_calls"]
    assert (call["function"]["name"], call["function"]["arguments"]) == ("weather", ARGUMENTS)
    assert choice["message"]["content"] is None
    if family is ToolCallParser.KIMI_K2:  # its template wants the id back that the model wrote
        assert call["id"] == "functions.weather:0"
    else:
        assert len(call["id"]) == (9 if family is ToolCallParser.MISTRAL else 29)


TEMPLATES = {
    "<|channel|>": (ToolCallParser.HARMONY, ReasoningParser.HARMONY),
    "[TOOL_CALLS]": (ToolCallParser.MISTRAL, ReasoningParser.NONE),
    "<｜tool▁calls▁begin｜> ```json </think>": (ToolCallParser.DEEPSEEK, ReasoningParser.QWEN3),
    "<｜tool▁calls▁begin｜>": (ToolCallParser.DEEPSEEK_V3_1, ReasoningParser.NONE),
    "<|start_header_id|>": (ToolCallParser.LLAMA3, ReasoningParser.NONE),
    "<tool_call> <think></think>": (ToolCallParser.HERMES, ReasoningParser.QWEN3),
    "<tool_call> <function=f> <parameter=k>": (ToolCallParser.QWEN3_CODER, ReasoningParser.NONE),
    "<tool_call> <arg_key> <think></think>": (ToolCallParser.GLM45, ReasoningParser.QWEN3),
    "<minimax:tool_call> <parameter=k> </think>": (
        ToolCallParser.MINIMAX_M2,
        ReasoningParser.QWEN3,
    ),
    "<seed:tool_call> <parameter=k> <seed:think></seed:think>": (
        ToolCallParser.SEED_OSS,
        ReasoningParser.SEED_OSS,
    ),
    "<|tool_calls_section_begin|> ◁/think▷": (ToolCallParser.KIMI_K2, ReasoningParser.KIMI),
    "[TOOL_CALLS] [THINK][/THINK]": (ToolCallParser.MISTRAL, ReasoningParser.MISTRAL),
    "<|header_start|> [func_name1(": (ToolCallParser.PYTHONIC, ReasoningParser.NONE),
    "<|header_start|>": (ToolCallParser.LLAMA3, ReasoningParser.NONE),
    "anything": (ToolCallParser.HERMES, ReasoningParser.NONE),
}


@pytest.mark.parametrize("source", TEMPLATES)
def test_style_is_read_off_the_template(source: str) -> None:
    style = OutputStyle.of(source, ToolCallParser.AUTO, ReasoningParser.AUTO)
    assert (style.tools, style.reasoning) == TEMPLATES[source]
    chosen = OutputStyle.of(source, ToolCallParser.LLAMA3, ReasoningParser.NONE)
    assert chosen == OutputStyle(ToolCallParser.LLAMA3, ReasoningParser.NONE)


@pytest.mark.parametrize(
    ("parser", "prompt", "is_inside"),
    [
        (ReasoningParser.QWEN3, "<|assistant|>", False),
        (ReasoningParser.QWEN3, "<|assistant|><think>\n", True),
        (ReasoningParser.QWEN3, "<|assistant|><think>\n\n</think>\n\n", False),
        (ReasoningParser.KIMI, "<|assistant|>◁think▷", True),
        (ReasoningParser.KIMI, "<|assistant|><think>", False),
        (ReasoningParser.MISTRAL, "[THINK][/THINK]", False),
        (ReasoningParser.DEEPSEEK_R1, "<|assistant|>", True),
        (ReasoningParser.DEEPSEEK_R1, "<|assistant|></think>", False),
    ],
)
def test_prompt_tells_whether_reasoning_has_begun(
    parser: ReasoningParser, prompt: str, is_inside: bool
) -> None:
    output = OutputStyle(reasoning=parser).output(prompt, None)
    assert output is not None
    assert output.starts_inside is is_inside
