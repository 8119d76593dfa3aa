"""Calls and reasoning of every family, whatever the places at which the text is cut."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.output.parser import (
    KIMI_THINK,
    MISTRAL_THINK,
    SEED_THINK,
    CallArguments,
    CallBegun,
    Content,
    Format,
    OutputParser,
    harmony,
    text_only,
    thinking,
)
from gateway.output.tool_formats import FAMILIES
from tests.gateway.output.parsing import JSON, Calls, check_every_cut, cut_anywhere, parse, whole

SCHEMAS: dict[str, dict[str, Any]] = {"get_weather": {}, "add": {}}
WEATHER = '{"city": "Paris \\"}{\\\\", "n": [1, {"a": "b"}]}'
ADD = '{"a":1,"b":-2.5e3}'
W, A = ("get_weather", WEATHER), ("add", ADD)

# family, output, content, calls, reasoning
CASES: list[tuple[str, str, str, Calls, str]] = [
    ("hermes", "Plain text.\n", "Plain text.\n", [], ""),
    ("hermes", " \n", " \n", [], ""),
    ("hermes", "a < b <tool but no call", "a < b <tool but no call", [], ""),
    (
        "hermes",
        f'<tool_call>\n{{"name": "get_weather", "arguments": {WEATHER}}}\n</tool_call>',
        "", [W], "",
    ),
    (
        "hermes",
        f'So:\n<tool_call>\n{{"name": "get_weather", "arguments": {WEATHER}}}\n</tool_call>\n'
        f'<tool_call>{{"arguments":{ADD},"name":"add"}}</tool_call>\nDone.',
        "So:\nDone.", [W, A], "",
    ),
    ("hermes", '<tool_call>{"name": "add"}</tool_call>', "", [("add", "{}")], ""),
    (
        "hermes",
        '<tool_call>{"name": "add", "arguments": "{\\"a\\": 1}"}</tool_call>',
        "", [("add", '{"a": 1}')], "",
    ),
    ("hermes", "<tool_call>nonsense</tool_call> on", "<tool_call>nonsense</tool_call> on", [], ""),
    ("hermes", '<tool_call>{"name": "add", "arguments": {"a"', "", [("add", '{"a"')], ""),
    ("hermes", '<tool_call>{"nam', '<tool_call>{"nam', [], ""),
    (
        "hermes",
        f'<tool_call>{{"name": "add", "arguments": {ADD}}} <tool_call>'
        f'{{"name": "get_weather", "arguments": {WEATHER}}}\nDone.',
        "Done.", [A, W], "",
    ),
    (
        "hermes",
        '<tool_call>{"id": {"x": [1]}, "name": "add", "arguments": {}}</tool_call>',
        "", [("add", "{}")], "",
    ),
    ("llama3", "Plain {text}.", "Plain {text}.", [], ""),
    ("llama3", f'{{"name": "add", "parameters": {ADD}}}', "", [A], ""),
    (
        "llama3",
        f'<|python_tag|>{{"name": "add", "parameters": {ADD}}}; '
        f'{{"type": "function", "name": "get_weather", "parameters": {WEATHER}}}',
        "", [A, W], "",
    ),
    ("llama3", '{"name": "Ada", "age": 36}', '{"name": "Ada", "age": 36}', [], ""),
    ("llama3", ' {"answer": 42}', ' {"answer": 42}', [], ""),
    ("llama3", '{"answer": [1, 2', '{"answer": [1, 2', [], ""),
    ("mistral", "Plain [TOOL] text", "Plain [TOOL] text", [], ""),
    (
        "mistral",
        f'[TOOL_CALLS] [{{"name": "add", "arguments": {ADD}}}, '
        f'{{"name": "get_weather", "arguments": {WEATHER}, "id": "123456789"}}]',
        "", [A, W], "",
    ),
    (
        "mistral",
        f"Well.[TOOL_CALLS]add[ARGS]{ADD}[TOOL_CALLS]get_weather[CALL_ID]abc[ARGS]{WEATHER}",
        "Well.", [A, W], "",
    ),
    ("mistral", f"[TOOL_CALLS]add{ADD}", "", [A], ""),
    ("mistral", "[TOOL_CALLS] hm", "[TOOL_CALLS]hm", [], ""),
    ("deepseek", "Plain <｜tool text", "Plain <｜tool text", [], ""),
    (
        "deepseek",
        "Well.\n<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>add\n```json\n"
        f"{ADD}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n"
        f"```json\n{WEATHER}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        "Well.\n", [A, W], "",
    ),
    (
        "deepseek",
        f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>add<｜tool▁sep｜>{ADD}<｜tool▁call▁end｜>"
        f"<｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{WEATHER}<｜tool▁call▁end｜>"
        "<｜tool▁calls▁end｜>",
        "", [A, W], "",
    ),
    (
        "kimi-k2",
        "Well. <|tool_calls_section_begin|><|tool_call_begin|>functions.add:0"
        f"<|tool_call_argument_begin|>{ADD}<|tool_call_end|><|tool_call_begin|>"
        f"functions.get_weather:1 <|tool_call_argument_begin|> {WEATHER} <|tool_call_end|>"
        "<|tool_calls_section_end|>",
        "Well. ", [A, W], "",
    ),
    (
        "kimi-k2",
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.add:0<|tool_call_argument_begin|>"
        "<|tool_call_end|><|tool_call_begin|>?<|tool_call_end|> on<|tool_calls_section_end|>!",
        "<|tool_call_begin|>?<|tool_call_end|> on!", [("add", "{}")], "",
    ),
    (
        "kimi-k2",
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.add:0<|tool_call_argument_begin|>"
        '{"a": 1',
        "", [("add", '{"a": 1')], "",
    ),
    (
        "kimi-k2",
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.ad",
        "<|tool_call_begin|>functions.ad", [], "",
    ),
    (
        "harmony",
        "<|channel|>analysis<|message|>They want…<|end|><|start|>assistant<|channel|>commentary"
        f"<|message|>I look.<|end|><|start|>assistant<|channel|>commentary to=functions.add "
        f"<|constrain|>json<|message|>{ADD}<|call|>",
        "I look.", [A], "They want…",
    ),
    (
        "harmony",
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>"
        "Hello <b>!",
        "Hello <b>!", [], "Hm.",
    ),
    (
        "harmony",
        f"<|start|>assistant to=functions.add<|channel|>commentary<|message|>{ADD}",
        "", [A], "",
    ),
    ("harmony", "no channels at all", "no channels at all", [], ""),
    ("think", "<think>\nHm, </thin.\n</think>\n\nYes.", "Yes.", [], "Hm, </thin.\n"),
    ("think", "No thoughts.", "No thoughts.", [], ""),
    ("think", "\n No thoughts.", "\n No thoughts.", [], ""),
    ("think", "<think>cut o", "", [], "cut o"),
    ("inside", "Hm.</think>Yes.", "Yes.", [], "Hm."),
    ("inside", "<think>Hm.</think>Yes.", "Yes.", [], "Hm."),
    ("inside", "never ends", "", [], "never ends"),
    (
        "kimi, kimi-k2",
        "I add.<|tool_calls_section_begin|><|tool_call_begin|>functions.add:0"
        f"<|tool_call_argument_begin|>{ADD}<|tool_call_end|><|tool_calls_section_end|>",
        "", [A], "I add.",
    ),
    ("◁think▷", "◁think▷Hm.◁/think▷Yes.", "Yes.", [], "Hm."),
    ("[THINK]", "[THINK]Hm.[/THINK] Yes.", "Yes.", [], "Hm."),
    ("<seed:think>", "<seed:think>Hm.</think></seed:think>Yes.", "Yes.", [], "Hm.</think>"),
    (
        "think, hermes",
        f'<think>I add.</think>\n\n<tool_call>{{"name": "add", "arguments": {ADD}}}</tool_call>',
        "", [A], "I add.",
    ),
]  # fmt: skip
THINK_TAGS = {tags.begin: tags for tags in (KIMI_THINK, MISTRAL_THINK, SEED_THINK)}
IDS = [f"{case[0]}-{number}" for number, case in enumerate(CASES)]


def _format(family: str) -> Format:
    if family == "harmony":
        return harmony
    if family in THINK_TAGS:
        return thinking(text_only, starts_inside=False, tags=THINK_TAGS[family])
    if family == "kimi, kimi-k2":
        calls = FAMILIES["kimi-k2"].read(SCHEMAS)
        return thinking(calls, starts_inside=True, call_marks=("<|tool_calls_section_begin|>",))
    if family == "inside":
        return thinking(text_only, starts_inside=True)
    if family.startswith("think"):
        answer = FAMILIES["hermes"].read(SCHEMAS) if "hermes" in family else text_only
        return thinking(answer, starts_inside=False)
    return FAMILIES[family].read(SCHEMAS)


@pytest.mark.parametrize(("family", "text", "content", "calls", "reasoning"), CASES, ids=IDS)
def test_parts_are_the_same_for_every_cut(
    family: str, text: str, content: str, calls: Calls, reasoning: str
) -> None:
    expected = (content, calls, reasoning)
    check_every_cut(_format(family), text, expected)
    for first, second in itertools.combinations(range(1, min(len(text), 60)), 2):
        pieces = [text[:first], text[first:second], text[second:]]
        assert whole(parse(_format(family), pieces)) == expected, pieces


@settings(max_examples=300)
@given(case=st.sampled_from(CASES), data=st.data())
def test_parts_are_the_same_for_any_cuts(case: Any, data: st.DataObject) -> None:
    family, text, *expected = case
    pieces = cut_anywhere(text, data)
    assert whole(parse(_format(family), pieces)) == tuple(expected)


@settings(max_examples=150)
@given(
    arguments=st.dictionaries(st.text(max_size=6), JSON, max_size=4),
    family=st.sampled_from(["hermes", "llama3", "mistral", "deepseek"]),
    indent=st.sampled_from([None, 1]),
    data=st.data(),
)
def test_any_arguments_arrive_as_written(
    arguments: dict[str, Any], family: str, indent: int | None, data: st.DataObject
) -> None:
    written = json.dumps(arguments, ensure_ascii=data.draw(st.booleans()), indent=indent)
    text = {
        "hermes": f'<tool_call>\n{{"name": "add", "arguments": {written}}}\n</tool_call>',
        "llama3": f'{{"name": "add", "parameters": {written}}}',
        "mistral": f'[TOOL_CALLS][{{"name": "add", "arguments": {written}}}]',
        "deepseek": f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>add<｜tool▁sep｜>{written}"
        "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    }[family]
    pieces = cut_anywhere(text, data)
    assert whole(parse(_format(family), pieces)) == ("", [("add", written)], "")


@pytest.mark.parametrize(
    ("family", "text"),
    [
        ("hermes", '<tool_call>{"name": "\\ud800", "arguments": {}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "add", "arguments": "\\ud83d"}</tool_call>'),
        ("pythonic", "[add(s='\\ud83d')]"),
    ],
)
def test_a_lone_surrogate_that_was_escaped_can_be_sent(family: str, text: str) -> None:
    _, calls, _ = whole(parse(_format(family), [text]))
    assert calls
    for name, arguments in calls:
        assert f"{name}{arguments}".encode()
        assert "\ufffd" in f"{name}{arguments}" or "\\ud83d" in arguments


def test_arguments_stream_before_they_are_whole() -> None:
    parser = OutputParser(FAMILIES["hermes"].read(SCHEMAS), lambda: "c")
    assert parser.push('<tool_call>{"name": "add", "argum') == [CallBegun(0, "c", "add")]
    assert parser.push('ents": {"a": "long te') == [CallArguments(0, '{"a": "long te')]
    assert parser.push("xt \\") == [CallArguments(0, "xt ")]
    assert parser.push('" more') == [CallArguments(0, '\\" more')]


def test_text_streams_but_for_what_may_become_a_marker() -> None:
    parser = OutputParser(FAMILIES["hermes"].read(SCHEMAS), lambda: "c")
    assert parser.push("text <to") == [Content("text ")]
    assert parser.push("p>") == [Content("<top>")]
