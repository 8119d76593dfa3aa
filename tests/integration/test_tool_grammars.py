"""Calls under a grammar: what the gateway asks for, the target compiles and the parser reads."""

from __future__ import annotations

import itertools
import json

import pytest
from llguidance import LLMatcher, LLTokenizer

from gateway.output.parser import CallArguments, CallBegun, OutputParser
from gateway.output.style import ChatOutput, OutputStyle, ReasoningParser, ToolCallParser
from gateway.output.tool_formats import FAMILIES, Tool, Toolbox
from services.target.grammars.source import SpecialTokens, grammar_source
from services.target.settings import DEMO_MODEL
from shared.grammar import Grammar, GrammarKind

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
TOOLS = (Tool("add", None, SCHEMA), Tool("ping", "it", {"type": "object", "properties": {}}))
TOKENIZER_JSON = (DEMO_MODEL / "tokenizer.json").read_text()

ADD, PING = '{"a": 1}', "{}"
WORDS = {
    ToolCallParser.HERMES: (
        f'<tool_call>\n{{"name": "add", "arguments": {ADD}}}\n</tool_call>\n'
        f'<tool_call>\n{{"name": "ping", "arguments": {PING}}}\n</tool_call>'
    ),
    ToolCallParser.LLAMA3: (
        f'{{"name": "add", "parameters": {ADD}}}; {{"name": "ping", "parameters": {PING}}}'
    ),
    ToolCallParser.MISTRAL: (
        f'[TOOL_CALLS][{{"name": "add", "arguments": {ADD}}}, '
        f'{{"name": "ping", "arguments": {PING}}}]'
    ),
    ToolCallParser.DEEPSEEK: (
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>add\n"
        f"```json\n{ADD}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>ping\n"
        f"```json\n{PING}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
    ),
    ToolCallParser.DEEPSEEK_V3_1: (
        f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>add<｜tool▁sep｜>{ADD}<｜tool▁call▁end｜>"
        f"<｜tool▁call▁begin｜>ping<｜tool▁sep｜>{PING}<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
    ),
    ToolCallParser.HARMONY: (
        f"<|channel|>commentary to=functions.add <|constrain|>json<|message|>{ADD}"
    ),
    ToolCallParser.QWEN3_CODER: (
        "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>\n"
        "<tool_call>\n<function=ping>\n</function>\n</tool_call>"
    ),
    ToolCallParser.SEED_OSS: (
        "<seed:tool_call>\n<function=add>\n<parameter=a>1</parameter>\n</function>\n"
        "</seed:tool_call>\n<seed:tool_call>\n<function=ping>\n</function>\n</seed:tool_call>"
    ),
    ToolCallParser.GLM45: (
        "<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n</tool_call>\n"
        "<tool_call>ping\n</tool_call>"
    ),
    ToolCallParser.MINIMAX_M2: (
        '<minimax:tool_call>\n<invoke name="add">\n<parameter name="a">1</parameter>\n</invoke>\n'
        '<invoke name="ping">\n</invoke>\n</minimax:tool_call>'
    ),
    ToolCallParser.KIMI_K2: (
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.add:0"
        f"<|tool_call_argument_begin|>{ADD}<|tool_call_end|><|tool_call_begin|>functions.ping:1"
        f"<|tool_call_argument_begin|>{PING}<|tool_call_end|><|tool_calls_section_end|>"
    ),
    ToolCallParser.PYTHONIC: "[add(a=1), ping()]",
}
# The one integer in a word, and what it must not be.
NUMBERS = {
    ToolCallParser.QWEN3_CODER: ("\n1\n", "\nx\n"),
    ToolCallParser.SEED_OSS: (">1<", ">x<"),
    ToolCallParser.GLM45: (">1<", ">x<"),
    ToolCallParser.MINIMAX_M2: (">1<", ">x<"),
    ToolCallParser.PYTHONIC: ("=1", "=x"),
}


@pytest.fixture(scope="module")
def tokenizer() -> LLTokenizer:
    return LLTokenizer(TOKENIZER_JSON, n_vocab=8192, eos_token=[2, 0])


def _matches(grammar: Grammar, text: str, tokenizer: LLTokenizer) -> bool:
    source = grammar_source(grammar, SpecialTokens.of(TOKENIZER_JSON))
    matcher = LLMatcher(tokenizer, source, log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    token_ids = tokenizer.tokenize_str(text, parse_special=True)
    return matcher.try_consume_tokens(token_ids) == len(token_ids) and matcher.is_accepting()


def _calls(output: ChatOutput, text: str) -> list[tuple[str, str]]:
    parser = OutputParser(output.format(), output.new_call_id)
    found = [*parser.push(text), *parser.flush()]
    names = [part.name for part in found if isinstance(part, CallBegun)]
    return [
        (
            name,
            "".join(p.text for p in found if isinstance(p, CallArguments) and p.index == index),
        )
        for index, name in enumerate(names)
    ]


@pytest.mark.parametrize("family", WORDS)
def test_required_calls_are_what_the_family_writes_and_nothing_else(
    tokenizer: LLTokenizer, family: ToolCallParser
) -> None:
    toolbox = Toolbox(TOOLS, must_call=True)
    output = OutputStyle(family).output("", toolbox)
    assert output is not None
    grammar = output.grammar(None)
    assert grammar is not None
    word = WORDS[family]
    assert _matches(grammar, word, tokenizer)
    expected = [("add", ADD), ("ping", PING)]
    assert _calls(output, word) == expected[: 1 if family is ToolCallParser.HARMONY else 2]
    other = word.replace(*NUMBERS.get(family, ('"a": 1', '"a": "x"')))
    for wrong in ("text", word + "!", other, word.replace("add", "x")):
        assert not _matches(grammar, wrong, tokenizer), wrong


@pytest.mark.parametrize("family", WORDS)
@pytest.mark.parametrize("starts_inside", [False, True])
def test_reasoning_may_come_before_a_required_call(
    tokenizer: LLTokenizer, family: ToolCallParser, starts_inside: bool
) -> None:
    is_harmony = family is ToolCallParser.HARMONY
    reasoning = ReasoningParser.HARMONY if is_harmony else ReasoningParser.QWEN3
    output = OutputStyle(family, reasoning).output(
        "<think>" if starts_inside else "", Toolbox(TOOLS, must_call=True)
    )
    assert output is not None
    grammar = output.grammar(None)
    assert grammar is not None
    thought = "" if starts_inside else "<think>"
    thought += "I < must > add.</think>\n\n"
    if is_harmony:
        thought = "<|channel|>analysis<|message|>I add.<|end|><|start|>assistant"
    assert _matches(grammar, thought + WORDS[family], tokenizer)
    assert not _matches(grammar, thought + "text", tokenizer)
    if not is_harmony:
        assert _matches(grammar, WORDS[family], tokenizer) is not starts_inside


@pytest.mark.parametrize("family", [family for family in WORDS if FAMILIES[family.value].trigger])
def test_strict_tools_leave_text_free_and_hold_calls(
    tokenizer: LLTokenizer, family: ToolCallParser
) -> None:
    toolbox = Toolbox((Tool("add", None, SCHEMA, is_strict=True), TOOLS[1]))
    output = OutputStyle(family).output("", toolbox)
    assert output is not None
    grammar = output.grammar(None)
    assert grammar is not None
    word = WORDS[family]
    for text in ("free text", f"So {word} done"):
        assert _matches(grammar, text, tokenizer), text
    other = word.replace(*NUMBERS.get(family, ('"a": 1', '"a": "x"')))
    assert not _matches(grammar, f"So {other}", tokenizer)


@pytest.mark.parametrize(
    ("kind", "text", "answer"),
    [
        (GrammarKind.JSON_SCHEMA, json.dumps(SCHEMA), ADD),
        (GrammarKind.REGEX, "[0-9]+", "12"),
        (GrammarKind.CHOICES, "yes", "yes"),
    ],
)
def test_answer_after_reasoning_is_held_to_what_was_asked(
    tokenizer: LLTokenizer, kind: GrammarKind, text: str, answer: str
) -> None:
    asked = Grammar.of(kind, text)
    thoughts = {
        ReasoningParser.QWEN3: ("<think>hm</think>", ""),
        ReasoningParser.HARMONY: (
            "<|channel|>analysis<|message|>hm<|end|><|start|>assistant",
            "<|channel|>final<|message|>",
        ),
    }
    for reasoning, (thought, header) in thoughts.items():
        output = OutputStyle(reasoning=reasoning).output("", None)
        assert output is not None
        grammar = output.grammar(asked)
        assert grammar is not None
        for before, after in itertools.product(("", thought), ("", "x")):
            word = before + header + answer + after
            assert _matches(grammar, word, tokenizer) is (not after), word
