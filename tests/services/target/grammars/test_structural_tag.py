"""Structural tags of both forms: free text is free, and what is in a tag is not."""

from __future__ import annotations

import json
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer

from services.target.grammars.source import SpecialTokens, structural_tag_lark
from services.target.settings import DEMO_MODEL
from shared.errors import InvalidArgument

TOKENIZER_JSON = (DEMO_MODEL / "tokenizer.json").read_text()
SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}


@pytest.fixture(scope="module")
def tokenizer() -> LLTokenizer:
    return LLTokenizer(TOKENIZER_JSON, n_vocab=8192, eos_token=[2, 0])


def _matches(tag: dict[str, Any], text: str, tokenizer: LLTokenizer) -> bool:
    lark = structural_tag_lark(tag, SpecialTokens.of(TOKENIZER_JSON))
    matcher = LLMatcher(tokenizer, LLMatcher.grammar_from_lark(lark), log_level=0)
    assert not matcher.is_error(), f"{matcher.get_error()}\n{lark}"
    token_ids = tokenizer.tokenize_str(text, parse_special=True)
    return matcher.try_consume_tokens(token_ids) == len(token_ids) and matcher.is_accepting()


def _tag(begin: str, content: dict[str, Any], end: str | list[str]) -> dict[str, Any]:
    return {"type": "tag", "begin": begin, "content": content, "end": end}


JSON = {"type": "json_schema", "json_schema": SCHEMA}
TEXT = {"type": "any_text"}
YES = {"type": "const_string", "value": "yes"}
STRUCTURES = {
    "type": "structural_tag",
    "structures": [
        {"begin": "<call=f>", "schema": SCHEMA, "end": "</call>"},
        {"begin": "<call=g>", "schema": {"type": "array"}, "end": "</call>"},
    ],
    "triggers": ["<call="],
}
CALL_F, CALL_G = '<call=f>{"n": 1}</call>', "<call=g>[1]</call>"
TRIGGERED = {"type": "triggered_tags", "triggers": ["<f>"], "tags": [_tag("<f>", JSON, "</f>")]}
CASES: dict[str, tuple[dict[str, Any], list[str], list[str]]] = {
    "structures": (
        STRUCTURES,
        ["", "just < text", CALL_F, f"I call {CALL_F} and {CALL_G}.", CALL_G + CALL_G],
        ["a <call=h>", "<call=f>[1]</call>", '<call=f>{"n": 1}', "<call=g>{}</call>"],
    ),
    "at least one": (
        {"format": {**TRIGGERED, "at_least_one": True}},
        ['<f>{"n":1}</f>', '<f>{"n":1}</f> and <f>{"n":2}</f> done'],
        ["", "text", "<f>1</f>", 'so: <f>{"n":1}</f>'],
    ),
    "stop after first": (
        {"format": {**TRIGGERED, "at_least_one": True, "stop_after_first": True}},
        ['<f>{"n":1}</f>'],
        ['<f>{"n":1}</f> done', "text", 'so: <f>{"n":1}</f>'],
    ),
    "stop after one, if any": (
        {"format": {**TRIGGERED, "stop_after_first": True}},
        ['so: <f>{"n":1}</f>', "text"],
        ['<f>{"n":1}</f> done'],
    ),
    "optional": (
        {"format": {"type": "sequence", "elements": [{"type": "optional", "content": YES}, JSON]}},
        ['{"n": 1}', 'yes{"n": 1}'],
        ['yesyes{"n": 1}'],
    ),
    "plus": ({"format": {"type": "plus", "content": YES}}, ["yes", "yesyes"], ["", "ye"]),
    "star": ({"format": {"type": "star", "content": YES}}, ["", "yesyes"], ["ye"]),
    "sequence": (
        {"format": {"type": "sequence", "elements": [_tag("<think>", TEXT, "</think>"), JSON]}},
        ['<think>any <b> thing</think>{"n": 1}', '<think></think>{"n": 1}'],
        ['{"n": 1}', "<think>x</think>", '<think>x</think> {"n": "1"}'],
    ),
    "or": (
        {"format": {"type": "or", "elements": [JSON, {"type": "const_string", "value": "no"}]}},
        ['{"n": 1}', "no"],
        ["yes", ""],
    ),
    "regex": ({"format": {"type": "regex", "pattern": r"a/\d+"}}, ["a/12"], ["a/", "a12"]),
    "several ends": (
        {"format": _tag("<a>", TEXT, ["</a>", "<eoa>"])},
        ["<a>x</a>", "<a>x<eoa>"],
        ["<a>x", "<a>x</a>y"],
    ),
    "separator": (
        {
            "format": {
                "type": "tags_with_separator",
                "tags": [_tag("<f>", JSON, "</f>")],
                "separator": "; ",
                "at_least_one": True,
            }
        },
        ['<f>{"n":1}</f>', '<f>{"n":1}</f>; <f>{"n":2}</f>'],
        ["", '<f>{"n":1}</f><f>{"n":2}</f>', '<f>{"n":1}</f>; '],
    ),
    "special trigger": (
        {
            "structures": [{"begin": "<|reserved_1|>f", "schema": SCHEMA, "end": "<|reserved_2|>"}],
            "triggers": ["<|reserved_1|>"],
        },
        ["text", 'then <|reserved_1|>f{"n": 1}<|reserved_2|> more'],
        ["<|reserved_1|>", "<|reserved_3|>", 'x<|reserved_1|>g{"n": 1}<|reserved_2|>'],
    ),
    "special end": (
        {"format": _tag("<|reserved_1|>", TEXT, "<|reserved_2|>")},
        ["<|reserved_1|>any text<|reserved_2|>"],
        ["<|reserved_1|>any text", "<|reserved_1|>any <|reserved_3|>text<|reserved_2|>"],
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_tag_matches_what_it_says(tokenizer: LLTokenizer, name: str) -> None:
    tag, words, others = CASES[name]
    assert [word for word in words if not _matches(tag, word, tokenizer)] == []
    assert [word for word in others if _matches(tag, word, tokenizer)] == []


def test_schemas_inside_a_tag_survive_a_round_trip_through_json(tokenizer: LLTokenizer) -> None:
    assert _matches(json.loads(json.dumps(STRUCTURES)), CALL_F, tokenizer)


@pytest.mark.parametrize(
    ("trigger", "reason"),
    [("<|reserved_1|>call", "mixes special tokens with text"), ("", "is empty")],
)
def test_trigger_that_cannot_be_watched_for_is_refused(trigger: str, reason: str) -> None:
    tags = [_tag(f"{trigger}f", JSON, "x")]
    tag = {"format": {"type": "triggered_tags", "triggers": [trigger], "tags": tags}}
    with pytest.raises(InvalidArgument, match=reason):
        structural_tag_lark(tag, SpecialTokens.of(TOKENIZER_JSON))


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ({**JSON, "style": "glm_xml"}, "the style 'glm_xml' of a JSON schema"),
        ({**TEXT, "excludes": ["<f>"]}, "`excludes` of any_text"),
        (_tag("<a>", {**TEXT, "excludes": ["<f>"]}, "</a>"), "`excludes` of any_text"),
        ({**TRIGGERED, "excludes": ["<g>"]}, "`excludes` of triggered_tags"),
        ({"type": "repeat", "min": 1, "max": 2, "content": JSON}, "the format 'repeat'"),
    ],
)
def test_what_would_be_ignored_is_refused(content: dict[str, Any], reason: str) -> None:
    with pytest.raises(InvalidArgument, match=f"{reason} is not implemented"):
        structural_tag_lark({"format": content}, SpecialTokens.of(TOKENIZER_JSON))


def test_defaults_that_are_spelled_out_change_nothing(tokenizer: LLTokenizer) -> None:
    plain = _tag("<a>", JSON, "</a>")
    spelled = _tag("<a>", {**JSON, "style": "json"}, "</a>")
    assert all(_matches({"format": tag}, '<a>{"n":1}</a>', tokenizer) for tag in (plain, spelled))
    assert _matches({"format": {**TEXT, "excludes": []}}, "text", tokenizer)
