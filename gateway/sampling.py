"""Turns request fields into sampling parameters, stop parameters and constraints on the output,
with the model's defaults and limits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

import orjson

from gateway.failures import client_names
from gateway.generation import Generation, TargetModel
from gateway.notices import give_notice
from gateway.output.grammar_schema import AnswerSchemas, check_schema, grammar_schema
from gateway.output.style import ChatOutput
from gateway.output.tools import Toolbox
from gateway.schema import (
    GenerationBody,
    KnownFields,
    ResponseFormat,
    SamplingFields,
    Speculation,
    StructuredOutputs,
    unimplemented,
)
from gateway.settings import GatewaySettings
from shared.errors import InvalidArgument
from shared.generation import check_token_ids
from shared.grammar import Grammar, GrammarKind, JsonSchema
from shared.sampling_defaults import OUTCOMES, TREE_STEPS, TREE_TOKENS, SamplingDefaults
from shared.text import Tokenizer
from shared.tokens import (
    MAX_BAD_WORDS,
    MAX_SALT_CHARACTERS,
    SamplingParams,
    StopParams,
    ThinkingBudget,
)

_NAMES = {field.name for field in fields(SamplingParams)} & SamplingFields.model_fields.keys()
_MAX_BAD_WORDS = MAX_BAD_WORDS // 2  # a word has two spellings
_MAX_WORD_CHARACTERS = 64
_MAX_STOP_CHARACTERS = 1024
_SEED_LIMIT = 2**63
_MAX_ALGORITHM_CHARACTERS = 64
_INT32_LIMIT = 2**31


def sampling_params(
    body: GenerationBody,
    defaults: SamplingDefaults,
    model: TargetModel,
    tokenizer: Tokenizer,
    thinking: ThinkingBudget | None = None,
) -> SamplingParams:
    """Returns the parameters of a body, with the model's defaults for absent fields.

    Body fields have the names of the parameters. Only fields that need conversion are named here.

    Raises:
        InvalidArgument: a value is out of its range; names the field.
    """
    fields_of_body = {name: getattr(body, name) for name in _NAMES}
    given = {name: value for name, value in fields_of_body.items() if value is not None}
    seed, top_k = given.get("seed", 0), given.get("top_k", 0)
    if not -_SEED_LIMIT <= seed < _SEED_LIMIT:
        raise InvalidArgument.out_of_range("seed", seed, "[-2^63, 2^63)")
    if top_k >= _INT32_LIMIT:
        raise InvalidArgument.out_of_range("top_k", top_k, "[-1, 2^31)")
    if top_k == -1:
        given["top_k"] = 0
    if "allowed_token_ids" in given:
        given["allowed_token_ids"] = _allowed(given["allowed_token_ids"])
    if "bad_words" in given:
        given["bad_words"] = _word_tokens(given["bad_words"], tokenizer)
    params = SamplingParams(**{**asdict(defaults), **given}, thinking=thinking)
    for name, token_ids in params.named_token_ids.items():
        check_token_ids(name, token_ids, model.vocab_size)
    return params


def _allowed(token_ids: Sequence[int]) -> tuple[int, ...]:
    if not token_ids:
        message = "allowed_token_ids is empty; it must hold a token"
        raise InvalidArgument.of("SAMPLING_PARAM_OUT_OF_RANGE", "allowed_token_ids", message)
    return tuple(dict.fromkeys(token_ids))


def _word_tokens(words: Sequence[str], tokenizer: Tokenizer) -> tuple[tuple[int, ...], ...]:
    """Returns the tokens of words as spelled at the beginning of a text and after a space."""
    if len(words) > _MAX_BAD_WORDS:
        limit = f"at most {_MAX_BAD_WORDS}"
        raise InvalidArgument.wrong_count("bad_words", len(words), "words", limit)
    spellings: dict[tuple[int, ...], None] = {}
    for index, word in enumerate(words):
        bare = word.lstrip()
        if not 1 <= len(bare) <= _MAX_WORD_CHARACTERS:
            field, limit = f"bad_words[{index}]", f"[1, {_MAX_WORD_CHARACTERS}]"
            raise InvalidArgument.wrong_count(field, len(bare), "characters", limit)
        for spelling in (bare, f" {bare}"):
            spellings[tuple(tokenizer.encode_word(spelling))] = None
    return tuple(spellings)


def check_stops(settings: GatewaySettings, field: str, stops: Sequence[str]) -> None:
    """Raises:
    InvalidArgument: there are too many, or one is empty or too long.
    """
    if len(stops) > settings.max_stop_strings:
        limit = f"at most {settings.max_stop_strings}"
        message = f"{field} has {len(stops):,} strings; it must have {limit}"
        raise InvalidArgument.of("STOP_OUT_OF_RANGE", field, message)
    for stop in stops:
        if not 1 <= len(stop) <= _MAX_STOP_CHARACTERS:
            limit = f"[1, {_MAX_STOP_CHARACTERS}]"
            message = f"a stop string has {len(stop)} characters; it must have {limit}"
            raise InvalidArgument.of("STOP_OUT_OF_RANGE", field, message)


@dataclass(frozen=True, slots=True)
class OutputLength:
    """A request's limit on the output length.

    Attributes:
        max_tokens: None allows as many as the context leaves.
        field: the field with the limit; None for a default, which is capped without a notice.
        is_capped: a limit above what the context leaves is capped with a notice, as clients of the
            interface rely on; else it is refused, as vLLM and SGLang do.
    """

    max_tokens: int | None
    field: str | None = None
    is_capped: bool = False


def stop_params(
    body: GenerationBody,
    length: OutputLength,
    num_prompt_tokens: int,
    model: TargetModel,
    *,
    least_tokens: int = 0,
) -> StopParams:
    """Returns the stop parameters, with the length capped at what the context leaves.

    Args:
        least_tokens: output tokens of a request with `max_tokens` 0.

    Raises:
        InvalidArgument: the prompt is empty or fills the context, the context does not hold the
            output, or a value is out of range.
    """
    limit, max_tokens = model.max_context_tokens, length.max_tokens
    if num_prompt_tokens == 0:
        raise InvalidArgument.prompt_empty()
    if num_prompt_tokens >= limit:
        raise InvalidArgument.prompt_too_long(num_prompt_tokens, limit - 1)
    num_left = limit - num_prompt_tokens
    if length.field is not None and max_tokens is not None and max_tokens > num_left:
        # Client libraries search for the words "maximum context length is".
        message = (
            f"{length.field} is {max_tokens:,}; it must be at most {num_left:,}, because this "
            f"model's maximum context length is {limit:,} tokens and the prompt has "
            f"{num_prompt_tokens:,}"
        )
        if not length.is_capped:
            raise InvalidArgument.of("OUTPUT_TOO_LONG", length.field, message)
        give_notice(f"{length.field} is {max_tokens:,}; the context leaves {num_left:,}")
    given = body.stop_token_ids or ()
    stop_token_ids = frozenset(token_id for token_id in given if 0 <= token_id < model.vocab_size)
    if len(stop_token_ids) < len(set(given)):  # some may be of another model's vocabulary
        give_notice(f"ids of stop_token_ids outside [0, {model.vocab_size}) have no effect")
    params = StopParams(
        max_output_tokens=num_left if max_tokens is None else max_tokens or least_tokens,
        min_output_tokens=body.min_tokens or 0,
        stop_token_ids=stop_token_ids,
        ignore_eos=body.ignore_eos,
    )
    return params.within(num_left)


def with_speculation(generation: Generation, settings: Speculation) -> Generation:
    """Returns a generation with its request's speculation settings. The target checks whether a
    draft of the algorithm is attached.

    Raises:
        InvalidArgument: a value is out of its range; names the field.
    """
    name = settings.algorithm
    if name is not None and not 1 <= len(name) <= _MAX_ALGORITHM_CHARACTERS:
        message = (
            f"speculation.algorithm has {len(name)} characters; "
            f"it must have [1, {_MAX_ALGORITHM_CHARACTERS}]"
        )
        raise InvalidArgument.of("ALGORITHM_UNKNOWN", "speculation.algorithm", message)
    return replace(
        generation,
        speculation_disabled=settings.disable,
        draft_algorithm=None if name is None else name.upper(),
        num_draft_steps=TREE_STEPS.checked(settings.num_steps),
        num_draft_tokens=TREE_TOKENS.checked(settings.num_draft_tokens),
        num_outcomes=OUTCOMES.checked(settings.outcome_budget),
        wants_trace=settings.trace,
    )


def check_priority(priority: int) -> int:
    """Raises:
    InvalidArgument: the priority does not fit the wire's int32.
    """
    if not -_INT32_LIMIT <= priority < _INT32_LIMIT:
        raise InvalidArgument.out_of_range("priority", priority, "[-2^31, 2^31)")
    return priority


def check_salt(salt: str) -> str:
    """Raises:
    InvalidArgument: the salt is empty or too long.
    """
    if not 1 <= len(salt) <= MAX_SALT_CHARACTERS:
        limit = f"[1, {MAX_SALT_CHARACTERS}]"
        raise InvalidArgument.wrong_count("cache_salt", len(salt), "characters", limit)
    return salt


# Constraints on the output, from the request fields of each interface.

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

_FieldGrammar = tuple[str, GrammarKind, Any]  # field, kind, value


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
    if grammar is not None and (toolbox is None or not toolbox.must_call):
        with client_names({"grammar": field}):
            grammar, text = _enforceable_grammar(grammar, notices)
    if output is not None:
        if toolbox is not None and output.constrains_calls(is_constrained=grammar is not None):
            with client_names({"grammar": "tools"}):
                toolbox, calls = _enforceable_tools(toolbox, notices)
            output = replace(output, toolbox=toolbox)
        try:
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
    enforced = grammar_schema(whole)
    if not enforced.unenforced:
        return grammar, None
    notices.append(_notice("the schema of the answer", enforced.unenforced))
    return Grammar.of(GrammarKind.JSON_SCHEMA, orjson.dumps(enforced.schema).decode()), whole


def _enforceable_tools(
    toolbox: Toolbox, notices: list[str]
) -> tuple[Toolbox, dict[str, JsonSchema]]:
    """Returns the tools without unenforceable keywords, and the whole schemas that have any."""
    tools, calls = [], {}
    for tool in toolbox.tools:
        whole = dict(tool.schema)
        check_schema(whole)  # the gateway itself reads parts of it
        enforced = grammar_schema(whole)
        if enforced.unenforced:
            calls[tool.name] = whole
            notices.append(_notice(f"the schema of the tool {tool.name!r}", enforced.unenforced))
        tools.append(replace(tool, schema=enforced.schema))
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
        schema = None if given.json_schema is None else given.json_schema.content
        if schema is None:
            message = "response_format.json_schema.schema is missing"
            raise InvalidArgument.of("FIELD_INVALID", "response_format.json_schema.schema", message)
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
