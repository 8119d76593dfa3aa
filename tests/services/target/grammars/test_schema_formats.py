"""Formats nobody knows are ignored, and nothing else is changed."""

from __future__ import annotations

import copy
from typing import Any

from llguidance import LLMatcher

from services.target.grammars.source import KNOWN_FORMATS, without_unknown_formats


def test_unknown_formats_are_left_out_wherever_schemas_are() -> None:
    odd: dict[str, Any] = {"type": "string", "format": "password"}
    plain = {"type": "string"}
    schema = {
        "properties": {"format": odd, "a": {"items": odd, "prefixItems": [odd, True]}},
        "$defs": {"x": {"anyOf": [odd, {"format": "date"}]}},
        "additionalProperties": odd,
        "enum": [{"format": "password"}],
        "default": {"format": "password"},
    }
    before = copy.deepcopy(schema)
    assert without_unknown_formats(schema) == {
        "properties": {"format": plain, "a": {"items": plain, "prefixItems": [plain, True]}},
        "$defs": {"x": {"anyOf": [plain, {"format": "date"}]}},
        "additionalProperties": plain,
        "enum": [{"format": "password"}],
        "default": {"format": "password"},
    }
    assert schema == before


def test_the_known_formats_are_those_of_the_library() -> None:
    for name in (*KNOWN_FORMATS, "password"):
        source = LLMatcher.grammar_from_json_schema({"type": "string", "format": name})
        is_error, _ = LLMatcher.validate_grammar_with_warnings(source)
        assert is_error == (name == "password"), name
