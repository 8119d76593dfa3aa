"""Constraints on the output, read from the request fields of each interface."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import orjson

from gateway.field_names import client_names
from gateway.output.held_schema import AnswerSchemas, check_schema, held_schema
from gateway.output.style import ChatOutput
from gateway.output.tools import Toolbox, ToolUse
from gateway.refusals import KnownFields, unimplemented
from gateway.schema import GenerationBody, ResponseFormat, StructuredOutputs
from shared.errors import InvalidArgument
from shared.grammar import Grammar, GrammarKind
from shared.json_schema import JsonSchema

ANY_OBJECT = Grammar.of(GrammarKind.JSON_SCHEMA, '{"type":"object"}')
_STRUCTURED_FIELDS = KnownFields(
    harmless=frozenset({"disable_fallback"}),
    unimplemented=frozenset(
        {"disable_any_whitespace", "disable_additional_properties", "whitespace_pattern"}
    ),
)


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
    found = [constraint for constraint in _constraints(body) if constraint is not None]
    if len(found) > 1:
        message = f"{found[1].field} is set beside {found[0].field}; only one may be"
        raise InvalidArgument.of("CONSTRAINT_AMBIGUOUS", found[1].field, message)
    return found[0] if found else None


def _constraints(body: GenerationBody) -> Iterator[Constraint | None]:
    yield _of_format(body.response_format)
    yield from _of_structured(body.structured_outputs)
    # vLLM's older names, then SGLang's.
    yield from _of_fields("guided_", body.guided_json, body.guided_regex, body.guided_grammar)
    yield _of_choices("guided_choice", body.guided_choice)
    yield _of("regex", GrammarKind.REGEX, body.regex)
    yield _of("ebnf", GrammarKind.EBNF, body.ebnf)
    yield _of("grammar", GrammarKind.EBNF, body.grammar)
    yield _of("json_schema", GrammarKind.JSON_SCHEMA, body.json_schema)
    yield _of("structural_tag", GrammarKind.STRUCTURAL_TAG, body.structural_tag)


def _of_format(given: ResponseFormat | None) -> Constraint | None:
    if given is None or given.type == "text":
        return None
    if given.type == "json_object":
        own = _of("response_format.schema", GrammarKind.JSON_SCHEMA, given.content)
        return own or Constraint(ANY_OBJECT, "response_format")
    if given.type == "json_schema":
        schema = None if given.json_schema is None else given.json_schema.content
        if schema is None:
            message = "response_format.json_schema.schema is missing"
            raise InvalidArgument.of("FIELD_INVALID", "response_format.json_schema.schema", message)
        return _of("response_format.json_schema", GrammarKind.JSON_SCHEMA, schema)
    if given.type == "structural_tag":
        tag = {"type": "structural_tag", **given.unknown_fields}
        return _of("response_format", GrammarKind.STRUCTURAL_TAG, tag)
    raise unimplemented("response_format.type", f"response_format of type {given.type[:64]!r}")


def _of_structured(given: StructuredOutputs | None) -> Iterator[Constraint | None]:
    if given is None:
        return
    prefix = "structured_outputs."
    _STRUCTURED_FIELDS.refuse(given.unknown_fields, prefix)
    yield from _of_fields(prefix, given.content, given.regex, given.grammar)
    yield _of_choices(f"{prefix}choice", given.choice)
    yield _of(f"{prefix}structural_tag", GrammarKind.STRUCTURAL_TAG, given.structural_tag)
    yield Constraint(ANY_OBJECT, f"{prefix}json_object") if given.json_object else None


def _of_fields(
    prefix: str, schema: Any, regex: str | None, grammar: str | None
) -> Iterator[Constraint | None]:
    yield _of(f"{prefix}json", GrammarKind.JSON_SCHEMA, schema)
    yield _of(f"{prefix}regex", GrammarKind.REGEX, regex)
    yield _of(f"{prefix}grammar", GrammarKind.EBNF, grammar)


def _of(field: str, kind: GrammarKind, given: Any) -> Constraint | None:
    """Returns the constraint of one field, whose JSON may come as text or as JSON."""
    if given is None:
        return None
    text = given if isinstance(given, str) else orjson.dumps(given).decode()
    return Constraint(Grammar.of(kind, text), field)


def _of_choices(field: str, given: list[str] | None) -> Constraint | None:
    if given is None:
        return None
    return Constraint(Grammar(GrammarKind.CHOICES, tuple(given)), field)
