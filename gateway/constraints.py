"""Constraints on the output, read from the request fields of each interface."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import orjson

from gateway.failures import client_names
from gateway.output.held_schema import AnswerSchemas, check_schema, held_schema
from gateway.output.style import ChatOutput
from gateway.output.tools import Toolbox, ToolUse
from gateway.refusals import KnownFields, unimplemented
from gateway.schema import GenerationBody, ResponseFormat, StructuredOutputs
from shared.errors import InvalidArgument
from shared.grammar import Grammar, GrammarKind, JsonSchema

_ANY_OBJECT = '{"type":"object"}'
_STRUCTURED_FIELDS = KnownFields(
    harmless=frozenset({"disable_fallback"}),
    unimplemented=frozenset(
        {"disable_any_whitespace", "disable_additional_properties", "whitespace_pattern"}
    ),
)

_Given = tuple[str, GrammarKind, Any]


@dataclass(frozen=True, slots=True)
class Constraint:
    """A grammar, and the field it came in.

    Attributes:
        field: as the client spells it; errors about the grammar name it.
    """

    grammar: Grammar
    field: str


@dataclass(frozen=True, slots=True)
class HeldOutput:
    """The grammar that constrains a request's output, and the schemas that check it at its end.

    Attributes:
        grammar: None lets it be anything.
        field: errors about the grammar name it.
        schemas: to check it against; None where the grammar holds all that was asked.
        notices: which keywords are only checked.
    """

    grammar: Grammar | None
    field: str
    schemas: AnswerSchemas | None
    notices: Sequence[str]


def held_output(constraint: Constraint | None, output: ChatOutput | None) -> HeldOutput:
    """Returns what the output must match because of a constraint and of its tools.

    Raises:
        InvalidArgument: a schema is wrong, or calls cannot be held to theirs.
    """
    grammar, field = (
        (None, "tools") if constraint is None else (constraint.grammar, constraint.field)
    )
    toolbox = None if output is None else output.toolbox
    notices: list[str] = []
    text: JsonSchema | None = None
    calls: dict[str, JsonSchema] = {}
    if grammar is not None and (toolbox is None or toolbox.use is ToolUse.AUTO):
        with client_names({"grammar": field}):
            grammar, text = _held_grammar(grammar, notices)
    if output is not None:
        if toolbox is not None and output.holds_calls(is_asked=grammar is not None):
            with client_names({"grammar": "tools"}):
                toolbox, calls = _held_tools(toolbox, notices)
            output = replace(output, toolbox=toolbox)
        try:
            grammar = output.grammar(grammar)
        except RecursionError as error:
            message = "the schema of a tool refers to itself too deeply"
            raise InvalidArgument.of("TOOL_SCHEMA_UNSUPPORTED", "tools", message) from error
    schemas = AnswerSchemas(text, calls) if text is not None or calls else None
    return HeldOutput(grammar, field, schemas, notices)


def _held_grammar(grammar: Grammar, notices: list[str]) -> tuple[Grammar, JsonSchema | None]:
    """Returns the grammar without what none can hold, and the schema if that leaves something."""
    if grammar.kind is not GrammarKind.JSON_SCHEMA:
        return grammar, None
    try:
        whole = orjson.loads(grammar.text)
    except ValueError:  # which the target says
        return grammar, None
    if not isinstance(whole, dict):
        return grammar, None
    held = held_schema(whole)
    if not held.unheld:
        return grammar, None
    notices.append(_notice("the schema of the answer", held.unheld))
    return Grammar.of(GrammarKind.JSON_SCHEMA, orjson.dumps(held.schema).decode()), whole


def _held_tools(toolbox: Toolbox, notices: list[str]) -> tuple[Toolbox, dict[str, JsonSchema]]:
    """Returns the tools likewise, and the schemas of those that are only held in part."""
    tools, calls = [], {}
    for tool in toolbox.tools:
        whole = dict(tool.schema)
        check_schema(whole)  # which is read here, in part
        held = held_schema(whole)
        if held.unheld:
            calls[tool.name] = whole
            notices.append(_notice(f"the schema of the tool {tool.name!r}", held.unheld))
        tools.append(replace(tool, schema=held.schema))
    return replace(toolbox, tools=tuple(tools)), calls


def _notice(what: str, unheld: Sequence[str]) -> str:
    return f"{', '.join(unheld)} in {what} is checked at the end only; see schema_check"


def json_schema_format(schema: dict[str, Any] | bool) -> ResponseFormat:
    """Returns the `response_format` of a schema that came in another interface's field."""
    content = {"name": "output", "schema": schema}
    return ResponseFormat.model_validate({"type": "json_schema", "json_schema": content})


def constraint_of(body: GenerationBody) -> Constraint | None:
    """Returns the constraint of a body; None when it has none.

    Raises:
        InvalidArgument: there are several, or one is malformed.
    """
    found = [
        Constraint(_grammar(kind, given), field)
        for field, kind, given in _given(body)
        if given is not None
    ]
    if len(found) > 1:
        message = f"{found[1].field} is set beside {found[0].field}; only one may be"
        raise InvalidArgument.of("CONSTRAINT_AMBIGUOUS", found[1].field, message)
    return found[0] if found else None


def _given(body: GenerationBody) -> Iterator[_Given]:
    """Yields every field that may hold a constraint, with its kind and what it holds."""
    if body.response_format is not None:
        yield _of_format(body.response_format)
    if body.structured_outputs is not None:
        yield from _of_structured(body.structured_outputs)
    # vLLM's older names, then SGLang's and llama.cpp's.
    yield "guided_json", GrammarKind.JSON_SCHEMA, body.guided_json
    yield "guided_regex", GrammarKind.REGEX, body.guided_regex
    yield "guided_grammar", GrammarKind.EBNF, body.guided_grammar
    yield "guided_choice", GrammarKind.CHOICES, body.guided_choice
    yield "regex", GrammarKind.REGEX, body.regex
    yield "ebnf", GrammarKind.EBNF, body.ebnf
    yield "grammar", GrammarKind.EBNF, body.grammar
    yield "json_schema", GrammarKind.JSON_SCHEMA, body.json_schema
    yield "structural_tag", GrammarKind.STRUCTURAL_TAG, body.structural_tag


def _of_format(given: ResponseFormat) -> _Given:
    if given.type == "text":
        return "response_format", GrammarKind.JSON_SCHEMA, None
    if given.type == "json_object":
        if given.content is None:
            return "response_format", GrammarKind.JSON_SCHEMA, _ANY_OBJECT
        return "response_format.schema", GrammarKind.JSON_SCHEMA, given.content
    if given.type == "json_schema":
        schema = None if given.json_schema is None else given.json_schema.content
        if schema is None:
            message = "response_format.json_schema.schema is missing"
            raise InvalidArgument.of("FIELD_INVALID", "response_format.json_schema.schema", message)
        return "response_format.json_schema", GrammarKind.JSON_SCHEMA, schema
    if given.type == "structural_tag":
        tag = {"type": "structural_tag", **given.unknown_fields}
        return "response_format", GrammarKind.STRUCTURAL_TAG, tag
    raise unimplemented("response_format.type", f"response_format of type {given.type[:64]!r}")


def _of_structured(given: StructuredOutputs) -> Iterator[_Given]:
    prefix = "structured_outputs."
    _STRUCTURED_FIELDS.refuse(given.unknown_fields, prefix)
    yield f"{prefix}json", GrammarKind.JSON_SCHEMA, given.content
    yield f"{prefix}regex", GrammarKind.REGEX, given.regex
    yield f"{prefix}grammar", GrammarKind.EBNF, given.grammar
    yield f"{prefix}choice", GrammarKind.CHOICES, given.choice
    yield f"{prefix}structural_tag", GrammarKind.STRUCTURAL_TAG, given.structural_tag
    if given.json_object:
        yield f"{prefix}json_object", GrammarKind.JSON_SCHEMA, _ANY_OBJECT


def _grammar(kind: GrammarKind, given: Any) -> Grammar:
    """Returns the grammar of a field, whose JSON may come as text or as JSON."""
    if kind is GrammarKind.CHOICES:
        return Grammar(kind, tuple(given))
    return Grammar.of(kind, given if isinstance(given, str) else orjson.dumps(given).decode())
