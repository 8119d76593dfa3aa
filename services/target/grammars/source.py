"""Translates grammars of clients into the notation of llguidance (Lark with embedded JSON schemas),
and compiles them to its matchers."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, regex_to_lark
from llguidance.gbnf_to_lark import any_to_lark

from services.target.grammars.matcher import CompiledGrammar, shown_reason
from shared.errors import InvalidArgument, OutriderError
from shared.grammar import Grammar, GrammarKind, JsonSchema, edited

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions


# Structural tags in Lark notation: free text with tags, whose content must match a schema.
#
# There are two forms. vLLM and SGLang began with `{"structures": [{begin, schema, end}],
# "triggers"}`; XGrammar's `{"format": …}` nests typed formats. The first becomes the second.
#
# Free text ends where a trigger is complete: its rule is lazy, so the text before the trigger is as
# short as possible and cannot contain it. Special tokens are never part of free text.


@dataclass(frozen=True, slots=True)
class SpecialTokens:
    """Special tokens by the text that spells them."""

    ids: Mapping[str, int]

    @classmethod
    def of(cls, tokenizer_json: str) -> SpecialTokens:
        """Reads the content of a `tokenizer.json`."""
        added = json.loads(tokenizer_json).get("added_tokens") or []
        return cls({entry["content"]: entry["id"] for entry in added if entry.get("special")})

    def literal(self, text: str) -> str:
        """Returns the Lark expression that matches `text`; empty for no text."""
        return " ".join(
            special(self.ids[part]) if part in self.ids else quoted(part)
            for part in self.split(text)
        )

    def split(self, text: str) -> list[str]:
        """Returns the special tokens in `text` and the plain texts between them, in order."""
        if not self.ids:
            return [text] if text else []
        names = sorted(self.ids, key=len, reverse=True)
        pattern = "(" + "|".join(map(re.escape, names)) + ")"
        return [part for part in re.split(pattern, text) if part]


def quoted(text: str) -> str:
    """Returns the Lark string of a text without special tokens."""
    return json.dumps(text, ensure_ascii=False)


def special(token_id: int) -> str:
    """Returns the Lark name of a token."""
    return f"<[{token_id}]>"


KNOWN_FORMATS = frozenset(
    {"date", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "time"}
    | {"unknown", "uri", "uuid"}
)


def without_unknown_formats(schema: JsonSchema) -> JsonSchema:
    """Returns the schema without `format` keywords of unknown formats. A property that is named
    `format`, or a value of an `enum`, stays."""

    def drop(part: JsonSchema) -> None:
        name = part.get("format")
        if isinstance(name, str) and name not in KNOWN_FORMATS:
            del part["format"]

    return edited(schema, drop)


JSON_OPTIONS: JsonCompileOptions = {"whitespace_pattern": r"[\x20\x0A\x0D\x09]{1,16}"}
"""White space between JSON tokens is allowed but bounded: else a model that falls into a run of
spaces might never leave it."""
Format = Mapping[str, Any]

_HEAD = "%llguidance {}\n"
_TEXT = r"TEXT: /(.|\n)*/"


def structural_tag_lark(tag: Format, tokens: SpecialTokens) -> str:
    """Returns the grammar of a structural tag.

    Raises:
        InvalidArgument: the tag has neither form, or a format that is not implemented.
    """
    rules = _Rules(tokens)
    try:
        start = rules.expression(_format(tag))
    except (KeyError, TypeError, AttributeError) as error:
        raise _wrong(f"{type(error).__name__} at {error}") from error
    except RecursionError as error:
        raise _wrong("it is nested too deeply") from error
    return "\n".join((_HEAD, f"start: {start}", *rules.lines, _TEXT))


def _format(tag: Format) -> Format:
    if "format" in tag:
        content: Format = tag["format"]
        return content
    if not tag.get("structures") or not tag.get("triggers"):
        raise _wrong("it needs `format`, or `structures` and `triggers`")
    tags = [
        {
            "begin": structure["begin"],
            "content": {"type": "json_schema", "json_schema": structure.get("schema") or {}},
            "end": structure["end"],
        }
        for structure in tag["structures"]
    ]
    return {"type": "triggered_tags", "triggers": tag["triggers"], "tags": tags}


class _Rules:
    """Writes a named Lark rule for each format that needs one."""

    def __init__(self, tokens: SpecialTokens) -> None:
        self.lines: list[str] = []
        self._tokens = tokens

    def expression(self, content: Format) -> str:
        """Returns the Lark expression of a format."""
        match content["type"]:
            case "const_string":
                return self._tokens.literal(content["value"]) or quoted("")
            case "json_schema":
                return self._json(content)
            case "regex":
                return f"/{regex_to_lark(content['pattern'], '')}/"
            case "any_text":
                _check_excludes(content)
                return "TEXT"
            case "sequence":
                elements = map(self.expression, content["elements"])
                return self._rule(" ".join(elements) or quoted(""))
            case "or":
                return self._any_of([self.expression(part) for part in content["elements"]])
            case "tag":
                return self._tag(content)
            case "triggered_tags":
                return self._triggered(content)
            case "tags_with_separator":
                return self._separated(content)
            case "optional" | "plus" | "star" as kind:
                suffix = {"optional": "?", "plus": "+", "star": "*"}[kind]
                return self._rule(f"({self.expression(content['content'])}){suffix}")
            case kind:
                raise _wrong(f"the format {str(kind)[:64]!r} is not implemented")

    def _json(self, content: Format) -> str:
        style = content.get("style", "json")
        if style != "json":
            raise _wrong(f"the style {str(style)[:64]!r} of a JSON schema is not implemented")
        schema = content["json_schema"]
        if schema is True:
            schema = {}
        schema = without_unknown_formats(schema)
        return "%json " + json.dumps({**schema, "x-guidance": JSON_OPTIONS})

    def _any_of(self, expressions: Sequence[str]) -> str:
        return self._rule(" | ".join(map(self._rule, expressions)))

    def _tag(self, tag: Format, begin: str | None = None) -> str:
        """Returns begin, content and end. Free text as content runs up to the first end."""
        head = self._tokens.literal(tag["begin"] if begin is None else begin)
        ends = [tag["end"]] if isinstance(tag["end"], str) else tag["end"]
        if tag["content"]["type"] == "any_text":
            _check_excludes(tag["content"])
            bodies = [self._text_until(end) for end in ends]
        else:
            body = self.expression(tag["content"])
            bodies = [f"{body} {self._tokens.literal(end)}" for end in ends]
        return self._rule(f"{head} {self._any_of(bodies)}")

    def _text_until(self, end: str) -> str:
        parts = self._tokens.split(end)
        if not parts or parts[0] in self._tokens.ids:
            return f"TEXT {self._tokens.literal(end)}"
        rest = self._tokens.literal(end[len(parts[0]) :])
        return f"{self._rule(f'TEXT {quoted(parts[0])}', is_lazy=True)} {rest}"

    def _triggered(self, content: Format) -> str:
        """Returns free text with tags in it. If a tag is required, the text begins with one."""
        _check_excludes(content)
        groups = [self._group(trigger, content["tags"]) for trigger in content["triggers"]]
        tags = self._any_of([group for group in groups if group])
        stops = content.get("stop_after_first", False)
        if not content.get("at_least_one", False):
            return self._any_of([tags, "TEXT"]) if stops else self._rule(f"{tags}* TEXT")
        first = self._any_of([self._tag(tag) for tag in content["tags"]])
        return first if stops else self._rule(f"{first} {tags}* TEXT")

    def _group(self, trigger: str, tags: Sequence[Format]) -> str:
        """Returns free text up to a trigger, then any of the tags that begin with the trigger."""
        parts = self._tokens.split(trigger)
        is_special = any(part in self._tokens.ids for part in parts)
        if len(parts) != 1:
            what = "mixes special tokens with text" if parts else "is empty"
            raise _wrong(f"the trigger {trigger[:64]!r} {what}")
        triggered = [tag for tag in tags if tag["begin"].startswith(trigger)]
        if not triggered:
            return ""
        head = f"TEXT {self._tokens.literal(trigger)}"
        before = self._rule(head, is_lazy=not is_special)
        rest = self._any_of([self._tag(tag, tag["begin"][len(trigger) :]) for tag in triggered])
        return self._rule(f"{before} {rest}")

    def _separated(self, content: Format) -> str:
        tags = self._any_of([self._tag(tag) for tag in content["tags"]])
        separator = self._tokens.literal(content["separator"])
        many = tags if content.get("stop_after_first", False) else f"{tags} ({separator} {tags})*"
        return self._rule(many if content.get("at_least_one", False) else f"({many})?")

    def _rule(self, body: str, *, is_lazy: bool = False) -> str:
        name = f"rule_{len(self.lines)}"
        self.lines.append(f"{name}{'[lazy]' if is_lazy else ''}: {body}")
        return name


def _check_excludes(content: Format) -> None:
    """Raises:
    InvalidArgument: the format excludes strings from free text, which is not implemented.
    """
    if content.get("excludes"):
        raise _wrong(f"`excludes` of {content['type']} is not implemented")


def _wrong(reason: str) -> InvalidArgument:
    return invalid_grammar(GrammarKind.STRUCTURAL_TAG, reason)


def grammar_source(grammar: Grammar, tokens: SpecialTokens) -> str:
    """Returns the text that llguidance compiles.

    Raises:
        InvalidArgument: the text is not of its kind. Other errors are found when it is compiled.
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
        return LLMatcher.grammar_from_lark(structural_tag_lark(tag, tokens))
    try:
        return LLMatcher.grammar_from_lark(any_to_lark(grammar.text))
    except Exception as error:  # the parser was written for trusted text
        raise invalid_grammar(kind, str(error)) from error


def json_object(text: str, kind: GrammarKind) -> dict[str, Any]:
    """Returns the parsed text; the schema `true`, which allows anything, becomes an empty object.

    Raises:
        InvalidArgument: the text is no JSON object.
    """
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise invalid_grammar(kind, f"it is not JSON: {error}") from error
    if value is True:
        return {}
    if not isinstance(value, dict):
        raise invalid_grammar(kind, "it is not a JSON object")
    return value


def invalid_grammar(kind: GrammarKind, reason: str) -> InvalidArgument:
    """Returns the error for a wrong grammar."""
    return InvalidArgument.of("GRAMMAR_INVALID", "grammar", f"the {kind.value} is wrong: {reason}")


STACK_BYTES = 512 * 2**20
"""Stack of a thread that compiles grammars, for long chains of rules that refer to each other:
llguidance bounds the nesting of rules, but not the length of such chains. The stack is address
space; unused parts take no memory."""


def too_complex(message: str) -> InvalidArgument:
    """Returns the error for a grammar beyond a bound."""
    return InvalidArgument.of("GRAMMAR_TOO_COMPLEX", "grammar", message)


# Limits below llguidance's defaults. Some 50,000 units of fuel take a millisecond; a state 2 kB.
_FIRST_MASK_FUEL = 300_000
_MAX_LEXER_STATES = 50_000
_MAX_STEP_ITEMS = 20_000


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The tokens that grammars are applied to."""

    tokenizer: LLTokenizer
    special_tokens: SpecialTokens


def read_vocabulary(path: Path, vocab_size: int, eos_token_ids: Sequence[int]) -> Vocabulary:
    """Reads a `tokenizer.json`; for the arguments see `GrammarCompiler`.

    Raises:
        OSError, ValueError: the file is missing, or llguidance does not support the tokenizer.
    """
    text = path.read_text("utf-8")
    eos = list(eos_token_ids) or None
    return Vocabulary(LLTokenizer(text, n_vocab=vocab_size, eos_token=eos), SpecialTokens.of(text))


def compiled(grammar: Grammar, vocabulary: Vocabulary) -> CompiledGrammar:
    """Compiles a grammar.

    Raises:
        InvalidArgument: the grammar is wrong.
    """
    try:
        source = grammar_source(grammar, vocabulary.special_tokens)
        limits = LLParserLimits(
            verbose_errors=False,
            initial_lexer_fuel=_FIRST_MASK_FUEL,
            max_lexer_states=_MAX_LEXER_STATES,
            step_max_items=_MAX_STEP_ITEMS,
        )
        matcher = LLMatcher(vocabulary.tokenizer, source, log_level=0, limits=limits)
        reason = matcher.get_error()
        if not matcher.is_error():
            first = matcher.deep_copy()
            can_begin = any(first.compute_bitmask())
            reason = first.get_error()
            if not reason and not can_begin:
                reason = "no token of the vocabulary can begin a match"
    except OutriderError:
        raise
    # llguidance parses untrusted text; a panic in Rust is no `Exception`.
    except BaseException as error:
        raise invalid_grammar(grammar.kind, shown_reason(str(error))) from error
    if reason:
        raise invalid_grammar(grammar.kind, shown_reason(reason))
    return CompiledGrammar(matcher, vocabulary.tokenizer.vocab_size)
