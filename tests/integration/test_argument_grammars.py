"""Arguments outside of JSON under a grammar: what schemas say holds, or is refused by name."""

from __future__ import annotations

import json
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer

from gateway.output.parser import CallArguments, OutputParser
from gateway.output.style import ChatOutput, OutputStyle, ToolCallParser
from gateway.output.tool_formats import Tool, Toolbox
from services.target.grammars.source import SpecialTokens, grammar_source
from services.target.settings import DEMO_MODEL
from shared.errors import InvalidArgument
from shared.grammar import Grammar

TOKENIZER_JSON = (DEMO_MODEL / "tokenizer.json").read_text()
TAGGED = (
    ToolCallParser.QWEN3_CODER,
    ToolCallParser.GLM45,
    ToolCallParser.MINIMAX_M2,
    ToolCallParser.SEED_OSS,
)
CODE = 'if a < b:\n\tprint("</p>")\n'


@pytest.fixture(scope="module")
def tokenizer() -> LLTokenizer:
    return LLTokenizer(TOKENIZER_JSON, n_vocab=8192, eos_token=[2, 0])


def _schema(properties: dict[str, Any], required: list[str] | None = None) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": required or []}


def _output(family: ToolCallParser, schema: dict[str, Any]) -> ChatOutput:
    tools = (Tool("f", None, schema),)
    output = OutputStyle(family).output("", Toolbox(tools, must_call=True, forced_name="f"))
    assert output is not None
    return output


def _grammar(family: ToolCallParser, schema: dict[str, Any]) -> Grammar:
    grammar = _output(family, schema).grammar(None)
    assert grammar is not None
    return grammar


def _matches(grammar: Grammar, text: str, tokenizer: LLTokenizer) -> bool:
    source = grammar_source(grammar, SpecialTokens.of(TOKENIZER_JSON))
    matcher = LLMatcher(tokenizer, source, log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    token_ids = tokenizer.tokenize_str(text, parse_special=True)
    return matcher.try_consume_tokens(token_ids) == len(token_ids) and matcher.is_accepting()


def _call(family: ToolCallParser, arguments: dict[str, str]) -> str:
    """Returns a call of `f` as the family's template writes it."""
    pairs = list(arguments.items())
    if family is ToolCallParser.GLM45:
        written = "".join(f"<arg_key>{k}</arg_key>\n<arg_value>{v}</arg_value>\n" for k, v in pairs)
        return f"<tool_call>f\n{written}</tool_call>"
    if family is ToolCallParser.MINIMAX_M2:
        written = "".join(f'<parameter name="{k}">{v}</parameter>\n' for k, v in pairs)
        return f'<minimax:tool_call>\n<invoke name="f">\n{written}</invoke>\n</minimax:tool_call>'
    if family is ToolCallParser.SEED_OSS:
        written = "".join(f"<parameter={k}>{v}</parameter>\n" for k, v in pairs)
        return f"<seed:tool_call>\n<function=f>\n{written}</function>\n</seed:tool_call>"
    if family is ToolCallParser.PYTHONIC:
        return "[f(" + ", ".join(f"{k}={v}" for k, v in pairs) + ")]"
    written = "".join(f"<parameter={k}>\n{v}\n</parameter>\n" for k, v in pairs)
    return f"<tool_call>\n<function=f>\n{written}</function>\n</tool_call>"


def _arguments(output: ChatOutput, text: str) -> Any:
    parser = OutputParser(output.format(), output.new_call_id)
    found = [*parser.push(text), *parser.flush()]
    return json.loads("".join(part.text for part in found if isinstance(part, CallArguments)))


# schema of one argument, texts that fit with their values, texts that do not
VALUES: list[tuple[dict[str, Any], dict[str, Any], tuple[str, ...]]] = [
    ({"type": "string"}, {CODE: CODE, "": "", "12": "12"}, ()),
    ({"type": "string", "enum": ["a b", "<c>"]}, {"a b": "a b", "<c>": "<c>"}, ("a", "")),
    ({"type": "string", "minLength": 2}, {"<b": "<b", "abc</": "abc</"}, ("a",)),
    ({"type": "string", "minLength": 1, "maxLength": 3}, {"abc": "abc"}, ("abcd", "")),
    ({"type": ["string", "null"]}, {"null": None, "nil": "nil"}, ()),
    ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, {"12": 12, "null": None}, ("a", "1.5")),
    ({"anyOf": [{"enum": ["x"]}, {"type": "integer"}]}, {"x": "x", "12": 12}, ("y",)),
    ({"type": "boolean"}, {"true": True}, ("True", "1")),
    ({"type": "number"}, {"-1.5e3": -1500.0, "2": 2}, ("x",)),
    ({"$ref": "#/$defs/N"}, {"[1, 2]": [1, 2]}, ("[x]", "1")),
    ({"const": 3}, {"3": 3}, ("4",)),
    ({}, {CODE: CODE, "12": 12}, ()),
]


@pytest.mark.parametrize("family", TAGGED)
@pytest.mark.parametrize(("schema", "fits", "others"), VALUES)
def test_values_between_tags_are_what_the_schema_says(
    tokenizer: LLTokenizer,
    family: ToolCallParser,
    schema: dict[str, Any],
    fits: dict[str, Any],
    others: tuple[str, ...],
) -> None:
    whole = {
        **_schema({"v": schema}, ["v"]),
        "$defs": {"N": {"type": "array", "items": {"type": "integer"}}},
    }
    output = _output(family, whole)
    grammar = _grammar(family, whole)
    for text, value in fits.items():
        call = _call(family, {"v": text})
        assert _matches(grammar, call, tokenizer), call
        assert _arguments(output, call) == {"v": value}
    for text in others:
        call = _call(family, {"v": text})
        assert not _matches(grammar, call, tokenizer), call


@pytest.mark.parametrize("family", [*TAGGED, ToolCallParser.PYTHONIC])
def test_arguments_come_in_order_and_those_required_must(
    tokenizer: LLTokenizer, family: ToolCallParser
) -> None:
    one = {"type": "integer"}
    grammar = _grammar(family, _schema({"a": one, "b": one, "c": one}, ["a"]))
    for keys in ("a", "ab", "ac", "abc"):
        assert _matches(grammar, _call(family, dict.fromkeys(keys, "1")), tokenizer), keys
    for keys in ("", "b", "ba", "ad"):
        assert not _matches(grammar, _call(family, dict.fromkeys(keys, "1")), tokenizer), keys
    grammar = _grammar(family, _schema({"a": one, "b": one}))
    for keys in ("", "a", "b", "ab"):
        assert _matches(grammar, _call(family, dict.fromkeys(keys, "1")), tokenizer), keys


def test_values_in_python_are_what_the_schema_says(tokenizer: LLTokenizer) -> None:
    family = ToolCallParser.PYTHONIC
    schema = _schema(
        {
            "s": {"type": "string"},
            "b": {"type": "boolean"},
            "e": {"enum": ["x", 1, None]},
            "o": {"type": "object", "additionalProperties": {"type": "boolean"}},
        },
        ["s"],
    )
    grammar = _grammar(family, schema)
    given = {"s": '"a, (\\"bé😀"', "b": "True", "e": "None", "o": '{"k": true}'}
    call = _call(family, given)
    assert _matches(grammar, call, tokenizer)
    assert _arguments(_output(family, schema), call) == {
        "s": 'a, ("bé😀',
        "b": True,
        "e": None,
        "o": {"k": True},
    }
    for key, wrong in {"s": "1", "b": "1", "e": "2", "o": '{"k": 1}'}.items():
        assert not _matches(grammar, _call(family, {**given, key: wrong}), tokenizer), key


@pytest.mark.parametrize(
    ("schema", "word"),
    [
        (_schema({"v": {"type": "string", "pattern": "^a+$"}}), "'pattern' for 'v'"),
        ({**_schema({}), "anyOf": [{"required": ["v"]}]}, "'anyOf' beside its properties"),
    ],
)
@pytest.mark.parametrize("family", TAGGED)
def test_schemas_that_cannot_be_held_to_are_refused_by_name(
    family: ToolCallParser, schema: dict[str, Any], word: str
) -> None:
    with pytest.raises(InvalidArgument, match=f"of the tool 'f' has {word}"):
        _grammar(family, schema)
