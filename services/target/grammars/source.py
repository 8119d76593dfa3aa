"""Grammars as clients write them, in the notation of llguidance: Lark with JSON schemas inside."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from llguidance import LLMatcher
from llguidance.gbnf_to_lark import any_to_lark

from services.target.grammars.structural_tag import (
    SpecialTokens,
    quoted,
    structural_tag_lark,
    without_unknown_formats,
)
from shared.errors import InvalidArgument
from shared.grammar import Grammar, GrammarKind

if TYPE_CHECKING:  # its stub alone has it
    from llguidance._lib import JsonCompileOptions

JSON_OPTIONS: JsonCompileOptions = {"whitespace_pattern": r"[\x20\x0A\x0D\x09]{1,16}"}
"""White space between JSON tokens is free but bounded: a model that falls into a run of spaces
would otherwise never leave it."""


def grammar_source(grammar: Grammar, tokens: SpecialTokens) -> str:
    """Returns the text that llguidance compiles.

    Raises:
        InvalidArgument: the text is not of its kind. Whether it is a valid grammar is found out
            when it is compiled.
    """
    kind = grammar.kind
    if kind is GrammarKind.REGEX:
        return LLMatcher.grammar_from_regex(grammar.text)
    if kind is GrammarKind.JSON_SCHEMA:
        schema = without_unknown_formats(json_object(grammar.text, kind))
        return LLMatcher.grammar_from_json_schema(schema, defaults=JSON_OPTIONS)
    if kind is GrammarKind.CHOICES:
        if not all(grammar.source) or not grammar.source:
            raise invalid_grammar(kind, "there must be at least one text, and none may be empty")
        return LLMatcher.grammar_from_lark("start: " + " | ".join(map(quoted, grammar.source)))
    if kind is GrammarKind.STRUCTURAL_TAG:
        tag = json_object(grammar.text, kind)
        return LLMatcher.grammar_from_lark(structural_tag_lark(tag, tokens, JSON_OPTIONS))
    try:
        return LLMatcher.grammar_from_lark(any_to_lark(grammar.text))
    except Exception as error:  # of a parser written for trusted text
        raise invalid_grammar(kind, str(error)) from error


def json_object(text: str, kind: GrammarKind) -> dict[str, Any]:
    """Raises:
    InvalidArgument: the text is no JSON object.
    """
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise invalid_grammar(kind, f"it is not JSON: {error}") from error
    # `true` is a schema as well: anything.
    if value is True:
        return {}
    if not isinstance(value, dict):
        raise invalid_grammar(kind, "it is not a JSON object")
    return value


def invalid_grammar(kind: GrammarKind, reason: str) -> InvalidArgument:
    """Returns the refusal of a grammar."""
    return InvalidArgument.of("GRAMMAR_INVALID", "grammar", f"the {kind.value} is wrong: {reason}")
