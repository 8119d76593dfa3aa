"""Request fields to sampling parameters, stop parameters and constraints on the output, with the
model's defaults and limits applied."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

import orjson

from gateway.failures import client_names
from gateway.generation import Generation, TargetModel
from gateway.notices import give_notice
from gateway.output.held_schema import AnswerSchemas, check_schema, held_schema
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
_MAX_BAD_WORDS = MAX_BAD_WORDS // 2  # each has two spellings
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
    """Returns what a body says, the model's defaults for the rest.

    Fields of bodies have the names of the parameters; those that need more than that stand here.

    Raises:
        InvalidArgument: a value is out of its range; names the field.
    """
    given = {name: getattr(body, name) for name in _NAMES}
    said = {name: value for name, value in given.items() if value is not None}
    seed, top_k = said.get("seed", 0), said.get("top_k", 0)
    if not -_SEED_LIMIT <= seed < _SEED_LIMIT:
        raise InvalidArgument.out_of_range("seed", seed, "[-2^63, 2^63)")
    if top_k >= _INT32_LIMIT:
        raise InvalidArgument.out_of_range("top_k", top_k, "[-1, 2^31)")
    if top_k == -1:
        said["top_k"] = 0
    if "allowed_token_ids" in said:
        said["allowed_token_ids"] = _allowed(said["allowed_token_ids"])
    if "bad_words" in said:
        said["bad_words"] = _word_tokens(said["bad_words"], tokenizer)
    params = SamplingParams(**{**asdict(defaults), **said}, thinking=thinking)
    for name, token_ids in params.named_token_ids.items():
        check_token_ids(name, token_ids, model.vocab_size)
    return params


def _allowed(token_ids: Sequence[int]) -> tuple[int, ...]:
    if not token_ids:
        message = "allowed_token_ids is empty; it must hold a token"
        raise InvalidArgument.of("SAMPLING_PARAM_OUT_OF_RANGE", "allowed_token_ids", message)
    return tuple(dict.fromkeys(token_ids))


def _word_tokens(words: Sequence[str], tokenizer: Tokenizer) -> tuple[tuple[int, ...], ...]:
    """Returns the tokens of words, at the beginning of a text and behind a space."""
    if len(words) > _MAX_BAD_WORDS:
        limit = f"at most {_MAX_BAD_WORDS}"
        raise InvalidArgument.wrong_count("bad_words", len(words), "words", limit)
    runs: dict[tuple[int, ...], None] = {}
    for index, word in enumerate(words):
        bare = word.lstrip()
        if not 1 <= len(bare) <= _MAX_WORD_CHARACTERS:
            field, limit = f"bad_words[{index}]", f"[1, {_MAX_WORD_CHARACTERS}]"
            raise InvalidArgument.wrong_count(field, len(bare), "characters", limit)
        for spelled in (bare, f" {bare}"):
            runs[tuple(tokenizer.encode_word(spelled))] = None
    return tuple(runs)


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
    """The limits on the output's length in a request.

    Attributes:
        max_tokens: None is all that the context leaves.
        field: that named it; None is a default, which is cut in silence.
        is_capped: more than the context leaves is cut with a notice, as clients of the interface
            rely on; else it is refused, as vLLM and SGLang do.
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
    num_least: int = 0,
) -> StopParams:
    """Returns when to stop, clamped to what the context leaves after the prompt.

    Args:
        num_least: tokens of output where none are asked for.

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
        # Client libraries look for the words "maximum context length is".
        message = (
            f"{length.field} is {max_tokens:,}; it must be at most {num_left:,}, because this "
            f"model's maximum context length is {limit:,} tokens and the prompt has "
            f"{num_prompt_tokens:,}"
        )
        if not length.is_capped:
            raise InvalidArgument.of("OUTPUT_TOO_LONG", length.field, message)
        give_notice(f"{length.field} is {max_tokens:,}; the context leaves {num_left:,}")
    given = body.stop_token_ids or ()
    stop_token_ids = frozenset(each for each in given if 0 <= each < model.vocab_size)
    if len(stop_token_ids) < len(set(given)):  # others, perhaps of another model, end nothing
        give_notice(f"ids of stop_token_ids outside [0, {model.vocab_size}) have no effect")
    asked = StopParams(
        max_output_tokens=num_left if max_tokens is None else max_tokens or num_least,
        min_output_tokens=body.min_tokens or 0,
        stop_token_ids=stop_token_ids,
        ignore_eos=body.ignore_eos,
    )
    return asked.within(num_left)


def with_speculation(generation: Generation, asked: Speculation) -> Generation:
    """Returns a generation with what its request says of speculation. Whether there is a draft of
    that algorithm is the target's to say.

    Raises:
        InvalidArgument: a value is out of its range; names the field.
    """
    name = asked.algorithm
    if name is not None and not 1 <= len(name) <= _MAX_ALGORITHM_CHARACTERS:
        message = (
            f"speculation.algorithm has {len(name)} characters; "
            f"it must have [1, {_MAX_ALGORITHM_CHARACTERS}]"
        )
        raise InvalidArgument.of("ALGORITHM_UNKNOWN", "speculation.algorithm", message)
    return replace(
        generation,
        speculation_disabled=asked.disable,
        draft_algorithm=None if name is None else name.upper(),
        num_draft_steps=TREE_STEPS.checked(asked.num_steps),
        num_draft_tokens=TREE_TOKENS.checked(asked.num_draft_tokens),
        num_outcomes=OUTCOMES.checked(asked.outcome_budget),
        wants_trace=asked.trace,
    )


def check_priority(priority: int) -> int:
    """Raises:
    InvalidArgument: it does not fit the wire.
    """
    if not -_INT32_LIMIT <= priority < _INT32_LIMIT:
        raise InvalidArgument.out_of_range("priority", priority, "[-2^31, 2^31)")
    return priority


def check_salt(salt: str) -> str:
    """Raises:
    InvalidArgument: it is empty or too long.
    """
    if not 1 <= len(salt) <= MAX_SALT_CHARACTERS:
        limit = f"[1, {MAX_SALT_CHARACTERS}]"
        raise InvalidArgument.wrong_count("cache_salt", len(salt), "characters", limit)
    return salt


# Constraints on the output, read from the request fields of each interface.

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

    grammar: Grammar | None = None
    field: str = "tools"
    schemas: AnswerSchemas | None = None
    notices: Sequence[str] = ()


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
    if grammar is not None and (toolbox is None or not toolbox.must_call):
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
    given: list[_Given] = []
    if body.response_format is not None:
        given.append(_of_format(body.response_format))
    if body.structured_outputs is not None:
        given += _of_structured(body.structured_outputs)
    given += [(field, kind, getattr(body, field)) for field, kind in _CONSTRAINT_FIELDS]
    found = [
        Constraint(_grammar(kind, value), field)
        for field, kind, value in given
        if value is not None
    ]
    if len(found) > 1:
        message = f"{found[1].field} is set beside {found[0].field}; only one may be"
        raise InvalidArgument.of("CONSTRAINT_AMBIGUOUS", found[1].field, message)
    return found[0] if found else None


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
        tag = {"type": "structural_tag", **(given.model_extra or {})}
        return "response_format", GrammarKind.STRUCTURAL_TAG, tag
    raise unimplemented("response_format.type", f"response_format of type {given.type[:64]!r}")


def _of_structured(given: StructuredOutputs) -> Iterator[_Given]:
    prefix = "structured_outputs."
    _STRUCTURED_FIELDS.refuse(given, prefix)
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
