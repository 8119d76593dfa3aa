"""The constraint on a request's output: the grammar that its fields and tools ask for, without what
no grammar enforces of a JSON schema. That is checked at the answer's end."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import orjson

from gateway.failures import client_names
from gateway.output.argument_formats import own_types, property_schema, resolved
from gateway.output.style import ChatOutput
from gateway.output.tool_formats import Toolbox
from gateway.schema import (
    GenerationBody,
    KnownFields,
    ResponseFormat,
    StructuredOutputs,
    required,
    unimplemented,
)
from shared.errors import InvalidArgument
from shared.grammar import Grammar, GrammarKind, JsonSchema, edited

_ANY_OBJECT = '{"type":"object"}'
_STRUCTURED_FIELDS = KnownFields(
    harmless=frozenset({"disable_fallback"}),
    unimplemented=frozenset(
        {"disable_any_whitespace", "disable_additional_properties", "whitespace_pattern"}
    ),
)

_CONSTRAINT_FIELDS = (
    # vLLM's older names, then SGLang's and llama.cpp's.
    ("guided_json", GrammarKind.JSON_SCHEMA),
    ("guided_regex", GrammarKind.REGEX),
    ("guided_grammar", GrammarKind.EBNF),
    ("guided_choice", GrammarKind.CHOICES),
    ("regex", GrammarKind.REGEX),
    ("ebnf", GrammarKind.EBNF),
    ("grammar", GrammarKind.EBNF),
    ("json_schema", GrammarKind.JSON_SCHEMA),
    ("structural_tag", GrammarKind.STRUCTURAL_TAG),
)
# Keywords that the target's grammars do not support, each with the values that have no effect.
_UNENFORCED: Mapping[str, Sequence[Any]] = {
    **dict.fromkeys(("if", "then", "else", "contains", "minContains", "maxContains"), ()),
    **dict.fromkeys(("$dynamicRef", "$recursiveRef"), ()),
    **dict.fromkeys(("dependencies", "dependentRequired", "dependentSchemas"), ({},)),
    **dict.fromkeys(("propertyNames", "unevaluatedItems", "unevaluatedProperties"), (True, {})),
    "$recursiveAnchor": (True, False),
    "not": (False,),
    "uniqueItems": (False,),
}
# Look-around and back references, which a grammar's patterns do not support.
_UNSUPPORTED_PATTERN = re.compile(r"\(\?<?[=!]|\\[1-9k]")
_DRAFTS = frozenset(
    [f"http://json-schema.org/draft-0{number}/schema" for number in (4, 6, 7)]
    + [f"https://json-schema.org/draft/{year}/schema" for year in ("2019-09", "2020-12")]
)

_FieldGrammar = tuple[str, GrammarKind, Any]  # field, kind, value


@dataclass(frozen=True, slots=True)
class AnswerSchemas:
    """Schemas that an answer is checked against when it ends.

    Attributes:
        text: schema of the answer's text; None where a grammar enforces it fully.
        calls: schemas of call arguments, by the name of the tool.
    """

    text: JsonSchema | None
    calls: Mapping[str, JsonSchema]


@dataclass(frozen=True, slots=True)
class Constraint:
    """A grammar that a request field asks for.

    Attributes:
        field: the field as the client spells it; errors about the grammar name it.
    """

    grammar: Grammar
    field: str


@dataclass(frozen=True, slots=True)
class OutputConstraint:
    """The grammar that constrains a request's output, and the schemas that check it at its end.

    Attributes:
        grammar: None allows any output.
        field: the field that errors about the grammar name.
        schemas: checked at the end; None where the grammar enforces the schemas fully.
        notices: tell the client which keywords are only checked.
    """

    grammar: Grammar | None = None
    field: str = "tools"
    schemas: AnswerSchemas | None = None
    notices: Sequence[str] = ()


def output_constraint(constraint: Constraint | None, output: ChatOutput | None) -> OutputConstraint:
    """Returns the constraint that results from the requested constraint and the tools.

    Raises:
        InvalidArgument: a schema is wrong, or a tool's schema cannot be enforced on its calls.
    """
    grammar, field = (
        (None, "tools") if constraint is None else (constraint.grammar, constraint.field)
    )
    toolbox = None if output is None else output.toolbox
    notices: list[str] = []
    text: JsonSchema | None = None
    calls: dict[str, JsonSchema] = {}
    if grammar is not None and toolbox is not None and toolbox.must_call:
        notices.append("a call is required, so the format of the answer has no effect")
    elif grammar is not None:
        with client_names({"grammar": field}):
            grammar, text = _enforceable_grammar(grammar, notices)
    if output is not None:
        if toolbox is not None and output.constrains_calls(is_constrained=grammar is not None):
            with client_names({"grammar": "tools"}):
                toolbox, calls = _enforceable_tools(toolbox, notices)
            output = replace(output, toolbox=toolbox)
        try:
            with client_names({"grammar": field}):
                grammar = output.grammar(grammar)
        except RecursionError as error:
            message = "the schema of a tool refers to itself too deeply"
            raise InvalidArgument.of("TOOL_SCHEMA_UNSUPPORTED", "tools", message) from error
    schemas = AnswerSchemas(text, calls) if text is not None or calls else None
    return OutputConstraint(grammar, field, schemas, notices)


def _enforceable_grammar(grammar: Grammar, notices: list[str]) -> tuple[Grammar, JsonSchema | None]:
    """Returns the grammar without unenforceable keywords, and the whole schema if it has any."""
    if grammar.kind is not GrammarKind.JSON_SCHEMA:
        return grammar, None
    try:
        whole = orjson.loads(grammar.text)
    except ValueError:  # the target refuses it
        return grammar, None
    if not isinstance(whole, dict):
        return grammar, None
    enforced, unenforced = grammar_schema(whole)
    if not unenforced:
        return grammar, None
    notices.append(_notice("the schema of the answer", unenforced))
    return Grammar.of(GrammarKind.JSON_SCHEMA, orjson.dumps(enforced).decode()), whole


def _enforceable_tools(
    toolbox: Toolbox, notices: list[str]
) -> tuple[Toolbox, dict[str, JsonSchema]]:
    """Returns the tools without unenforceable keywords, and the whole schemas that have any."""
    tools, calls = [], {}
    for tool in toolbox.tools:
        whole = dict(tool.schema)
        check_schema(whole)  # the gateway itself reads parts of it
        enforced, unenforced = grammar_schema(whole)
        if unenforced:
            calls[tool.name] = whole
            notices.append(_notice(f"the schema of the tool {tool.name!r}", unenforced))
        tools.append(replace(tool, schema=enforced))
    return replace(toolbox, tools=tuple(tools)), calls


def _notice(what: str, unenforced: Sequence[str]) -> str:
    return f"{', '.join(unenforced)} in {what} is checked at the end only; see schema_check"


def json_schema_format(schema: dict[str, Any] | bool) -> ResponseFormat:
    """Returns the `response_format` of a schema from another interface's field."""
    content = {"name": "output", "schema": schema}
    return ResponseFormat.model_validate({"type": "json_schema", "json_schema": content})


def constraint_of(body: GenerationBody) -> Constraint | None:
    """Returns the constraint of a body; None when it has none.

    Raises:
        InvalidArgument: there are several, or one is malformed.
    """
    candidates: list[_FieldGrammar] = []
    if body.response_format is not None:
        candidates.append(_response_format_grammar(body.response_format))
    if body.structured_outputs is not None:
        candidates += _structured_grammars(body.structured_outputs)
    candidates += [(field, kind, getattr(body, field)) for field, kind in _CONSTRAINT_FIELDS]
    constraints = [
        Constraint(_grammar(kind, value), field)
        for field, kind, value in candidates
        if value is not None
    ]
    if len(constraints) > 1:
        message = f"{constraints[1].field} is set beside {constraints[0].field}; only one may be"
        raise InvalidArgument.of("CONSTRAINT_AMBIGUOUS", constraints[1].field, message)
    return constraints[0] if constraints else None


def _response_format_grammar(given: ResponseFormat) -> _FieldGrammar:
    if given.type == "text":
        return "response_format", GrammarKind.JSON_SCHEMA, None
    if given.type == "json_object":
        if given.content is None:
            return "response_format", GrammarKind.JSON_SCHEMA, _ANY_OBJECT
        return "response_format.schema", GrammarKind.JSON_SCHEMA, given.content
    if given.type == "json_schema":
        schema: Any = None if given.json_schema is None else given.json_schema.content
        schema = required("response_format.json_schema.schema", schema)
        return "response_format.json_schema", GrammarKind.JSON_SCHEMA, schema
    if given.type == "structural_tag":
        tag = {"type": "structural_tag", **(given.model_extra or {})}
        return "response_format", GrammarKind.STRUCTURAL_TAG, tag
    raise unimplemented("response_format.type", f"response_format of type {given.type[:64]!r}")


def _structured_grammars(given: StructuredOutputs) -> Iterator[_FieldGrammar]:
    prefix = "structured_outputs."
    _STRUCTURED_FIELDS.refuse(given, prefix)
    yield f"{prefix}json", GrammarKind.JSON_SCHEMA, given.content
    yield f"{prefix}regex", GrammarKind.REGEX, given.regex
    yield f"{prefix}grammar", GrammarKind.EBNF, given.grammar
    yield f"{prefix}choice", GrammarKind.CHOICES, given.choice
    yield f"{prefix}structural_tag", GrammarKind.STRUCTURAL_TAG, given.structural_tag
    if given.json_object:
        yield f"{prefix}json_object", GrammarKind.JSON_SCHEMA, _ANY_OBJECT


def _grammar(kind: GrammarKind, value: Any) -> Grammar:
    """Returns the grammar of a field, whose JSON may come as text or as JSON."""
    if kind is GrammarKind.CHOICES:
        return Grammar(kind, tuple(value))
    return Grammar.of(kind, value if isinstance(value, str) else orjson.dumps(value).decode())


def grammar_schema(whole: JsonSchema) -> tuple[JsonSchema, tuple[str, ...]]:
    """Returns the part of a schema that a grammar can enforce, which allows every value that the
    whole allows; and the keywords that it lacks, sorted.

    Raises:
        InvalidArgument: the part lacks a keyword of the schema, and the schema is wrong.
    """
    unenforced: set[str] = set()

    def loosen(schema: JsonSchema) -> None:
        _drop_keywords(schema, unenforced)
        _drop_patterns(schema, unenforced)
        _join_alternatives(schema, whole, unenforced)

    enforced = edited(whole, loosen)
    if unenforced:
        check_schema(whole)
    return enforced, tuple(sorted(unenforced))


def _drop_keywords(schema: JsonSchema, unenforced: set[str]) -> None:
    for keyword in _UNENFORCED.keys() & schema.keys():
        if schema.pop(keyword) not in _UNENFORCED[keyword]:
            unenforced.add(keyword)
    if "$dynamicAnchor" in schema:  # without `$dynamicRef` it is only a plain anchor
        schema.setdefault("$anchor", schema.pop("$dynamicAnchor"))


def _drop_patterns(schema: JsonSchema, unenforced: set[str]) -> None:
    if _is_unsupported(schema.get("pattern")):
        del schema["pattern"]
        unenforced.add("pattern")
    patterns = schema.get("patternProperties")
    if isinstance(patterns, dict) and any(map(_is_unsupported, patterns)):
        del schema["patternProperties"]
        schema.pop("additionalProperties", None)  # would forbid properties that a pattern allows
        unenforced.add("patternProperties")


def _is_unsupported(pattern: object) -> bool:
    return isinstance(pattern, str) and _UNSUPPORTED_PATTERN.search(pattern) is not None


def _join_alternatives(schema: JsonSchema, whole: JsonSchema, unenforced: set[str]) -> None:
    """Replaces `oneOf` by `anyOf`, which is the same if no value matches two alternatives."""
    alternatives = schema.get("oneOf")
    if not isinstance(alternatives, list):
        return
    del schema["oneOf"]
    if "anyOf" not in schema:
        schema["anyOf"] = alternatives
    else:
        all_of = schema.get("allOf")
        all_of = all_of if isinstance(all_of, list) else []
        schema["allOf"] = [*all_of, {"anyOf": alternatives}]
    if not _are_disjoint(alternatives, whole):
        unenforced.add("oneOf")


def _are_disjoint(alternatives: list[Any], whole: JsonSchema) -> bool:
    """Returns whether no value can match two alternatives, because of their types or of different
    values of a property that all of them require."""
    if not all(isinstance(alternative, Mapping) for alternative in alternatives):
        return False
    schemas = [resolved(alternative, whole) for alternative in alternatives]
    types = [own_types(schema) for schema in schemas]
    types = [names | {"integer"} if "number" in names else names for names in types]
    if sum(map(len, types)) == len(frozenset().union(*types)):
        return True
    if any(names != {"object"} for names in types):
        return False
    required_names = [_strings(schema.get("required")) for schema in schemas]
    common = frozenset.intersection(*required_names)
    return any(_is_discriminator(name, schemas, whole) for name in common)


def _is_discriminator(name: str, schemas: Sequence[Mapping[str, Any]], whole: JsonSchema) -> bool:
    """Returns whether the property has different strings as values in every schema."""
    seen: set[str] = set()
    for schema in schemas:
        value_schema = resolved(property_schema(schema, name), whole)
        constant = [value_schema["const"]] if "const" in value_schema else []
        values = value_schema.get("enum", constant)
        strings = _strings(values)
        if not strings or len(strings) < len(values) or seen & strings:
            return False
        seen |= strings
    return True


def _strings(values: object) -> frozenset[str]:
    """Returns the strings of a list; none if `values` is not a list."""
    items = values if isinstance(values, list) else ()
    return frozenset(item for item in items if isinstance(item, str))


def check_schema(schema: JsonSchema) -> None:
    """Raises:
    InvalidArgument: `schema` is not a JSON schema.
    """
    import jsonschema_rs  # 10 ms, for schemas that few requests have

    draft = schema.get("$schema")
    if not isinstance(draft, str) or draft.removesuffix("#") not in _DRAFTS:  # do not fetch it
        schema = {key: value for key, value in schema.items() if key != "$schema"}
    try:
        jsonschema_rs.meta.validate(schema)
    except jsonschema_rs.ValidationError as error:
        place = "".join(f"[{part!r}]" for part in error.instance_path)
        message = f"the JSON schema is wrong at {place or 'its top'}: {error.message[:500]}"
        raise InvalidArgument.of("GRAMMAR_INVALID", "grammar", message) from error
