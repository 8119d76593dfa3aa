"""What grammars cannot enforce is left out of a schema, named, and nothing else is."""

from __future__ import annotations

import copy
from typing import Any

import jsonschema_rs
import pytest
from llguidance import LLMatcher

from gateway.constraints import OutputConstraint, grammar_schema, output_constraint
from gateway.output.argument_formats import TAGS
from gateway.output.style import ChatOutput, OutputStyle, ReasoningParser, ToolCallParser
from gateway.output.tool_formats import Tool, Toolbox
from shared.errors import InvalidArgument

OBJECT = {"type": "object"}
A, B = ({"properties": {"a": {"const": text}}, "required": ["a"], **OBJECT} for text in "ab")
# A schema, the keywords that are left out of it, JSON that it refuses for one of them.
CASES: list[tuple[dict[str, Any], list[str], Any]] = [
    ({"type": "array", "uniqueItems": True}, ["uniqueItems"], [1, 1]),
    ({"propertyNames": {"pattern": "^a"}, **OBJECT}, ["propertyNames"], {"b": 1}),
    ({"type": "array", "contains": {"type": "integer"}}, ["contains"], ["a"]),
    (
        {"type": "array", "contains": {}, "minContains": 2, "maxContains": 3},
        ["contains", "maxContains", "minContains"],
        [1],
    ),
    ({"type": "integer", "not": {"enum": [1]}}, ["not"], 1),
    ({"if": A, "then": {"required": ["b"]}, "else": False}, ["else", "if", "then"], {"a": "a"}),
    ({"dependentRequired": {"a": ["b"]}, **OBJECT}, ["dependentRequired"], {"a": 1}),
    ({"dependentSchemas": {"a": False}, **OBJECT}, ["dependentSchemas"], {"a": 1}),
    ({"allOf": [A], "unevaluatedProperties": False}, ["unevaluatedProperties"], {"a": "a", "b": 1}),
    ({"type": "array", "unevaluatedItems": False}, ["unevaluatedItems"], [1]),
    ({"type": "string", "pattern": "^(?!a)"}, ["pattern"], "ab"),
    ({"type": "string", "pattern": r"^(a|b)\1$"}, ["pattern"], "ab"),
    (
        {"patternProperties": {"(?=a)": {}}, "additionalProperties": False, **OBJECT},
        ["patternProperties"],
        {"b": 1},
    ),
    ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, ["oneOf"], 1),
    (
        {"oneOf": [OBJECT, A], "anyOf": [OBJECT], "allOf": [OBJECT]},
        ["oneOf"],
        {"a": "a"},
    ),
    (
        {"properties": {"a": {"$ref": "#/$defs/x"}}, "$defs": {"x": {"uniqueItems": True}}},
        ["uniqueItems"],
        {"a": [1, 1]},
    ),
    (
        {"$dynamicAnchor": "a", "properties": {"a": {"$dynamicRef": "#a"}}, **OBJECT},
        ["$dynamicRef"],
        {"a": 1},
    ),
]


@pytest.mark.parametrize(("schema", "unenforced", "refused"), CASES, ids=str)
def test_what_no_grammar_enforces_is_left_out_and_named(
    schema: dict[str, Any], unenforced: list[str], refused: Any
) -> None:
    before = copy.deepcopy(schema)
    enforced, lacking = grammar_schema(schema)
    assert list(lacking) == unenforced
    assert schema == before
    source = LLMatcher.grammar_from_json_schema(enforced)
    assert not LLMatcher.validate_grammar(source)
    # The grammar allows more, and the check refuses that.
    assert jsonschema_rs.is_valid(enforced, refused)
    assert not jsonschema_rs.is_valid(schema, refused)


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "array", "items": {"type": "integer"}, "uniqueItems": False},
        {"propertyNames": {}, "unevaluatedProperties": True, "dependentRequired": {}, **OBJECT},
        {"enum": [{"uniqueItems": True}], "default": {"not": {}}},
        {"properties": {"uniqueItems": {"type": "string"}}, **OBJECT},
        {"oneOf": [{"type": "integer"}, {"type": "string"}]},
        {"oneOf": [A, B]},
        {"oneOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}], "$defs": {"a": A, "b": B}},
        {"$dynamicAnchor": "a", "properties": {"a": {"$ref": "#a"}}, **OBJECT},
    ],
    ids=str,
)
def test_what_asks_for_nothing_needs_no_check(schema: dict[str, Any]) -> None:
    enforced, unenforced = grammar_schema(schema)
    assert unenforced == ()
    assert not LLMatcher.validate_grammar(LLMatcher.grammar_from_json_schema(enforced))


@pytest.mark.parametrize(
    "schema",
    [
        {"not": 5},
        {"uniqueItems": "yes"},
        {"not": {}, "properties": 3},
        {"not": {}, "oneOf": {"a": 1}},
        {"not": {}, "oneOf": [3], "anyOf": 4, "allOf": 5},
        {"not": {}, "oneOf": [{"enum": 4}], "patternProperties": 4, "pattern": 3},
        {"oneOf": [{"required": [{}], **OBJECT}, {"required": 3, **OBJECT}]},
    ],
    ids=str,
)
def test_a_wrong_schema_is_refused_where_no_grammar_would_say(schema: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgument, match="the JSON schema is wrong at"):
        grammar_schema(schema)


def test_a_schema_of_an_unknown_kind_is_never_fetched() -> None:
    schema = {"$schema": "http://127.0.0.1:9/schema", "uniqueItems": True}
    assert grammar_schema(schema)[1] == ("uniqueItems",)


FORMATS = [
    each for each in ToolCallParser if each not in (ToolCallParser.AUTO, ToolCallParser.NONE)
]


@pytest.mark.parametrize("parser", FORMATS)
@pytest.mark.parametrize(
    "schema",
    [
        {"properties": {"a": {"enum": True}}},
        {"required": 5},
        {"required": [{}]},
        {"properties": {"a": {"type": "string", "minLength": {}}}},
        {"properties": {"a": {"anyOf": [True, "text"]}}},
    ],
    ids=str,
)
def test_a_wrong_schema_of_a_tool_is_refused(parser: ToolCallParser, schema: Any) -> None:
    with pytest.raises(InvalidArgument, match="the JSON schema is wrong at"):
        _constraint(parser, schema)


@pytest.mark.parametrize("parser", FORMATS)
def test_a_schema_may_refer_to_itself(parser: ToolCallParser) -> None:
    """Each alternative is looked at once: their number does not multiply."""
    again = {"anyOf": [{"$ref": "#/$defs/a"}] * 40 + [{"type": "string"}, {"type": "integer"}]}
    schema = {"$defs": {"a": again}, "properties": {"x": {"$ref": "#/$defs/a"}}}
    assert _constraint(parser, schema).grammar is not None
    chain = {f"a{n}": {"anyOf": [{"$ref": f"#/$defs/a{n + 1}"}]} for n in range(3000)}
    chain["a3000"] = {"type": "string"}  # type: ignore[dict-item]
    deep = {"$defs": chain, "properties": {"x": {"$ref": "#/$defs/a0"}}}
    if parser.value in TAGS or parser is ToolCallParser.PYTHONIC:  # argument by argument
        with pytest.raises(InvalidArgument, match="refers to itself too deeply"):
            _constraint(parser, deep)


def _constraint(parser: ToolCallParser, schema: Any) -> OutputConstraint:
    toolbox = Toolbox((Tool("pick", None, schema),), must_call=True)
    style = OutputStyle(parser, ReasoningParser.NONE)
    return output_constraint(None, ChatOutput(style, toolbox, False))
