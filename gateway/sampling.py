"""Turns request fields into sampling and stop parameters, with the model's defaults and limits; and
finds stop strings and patterns in text that arrives in pieces."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

import regex

from gateway.failures import give_notice
from gateway.generation import Generation, TargetModel
from gateway.schema import GenerationBody, SamplingFields, Speculation
from gateway.settings import GatewaySettings
from shared.errors import InvalidArgument
from shared.generation import check_token_ids
from shared.sampling_defaults import OUTCOMES, TREE_STEPS, TREE_TOKENS, SamplingDefaults
from shared.text import StopStrings, Tokenizer
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
_STOP_REGEX = "stop_regex"
_SEARCH_TIMEOUT_S = 0.05
_CONTEXT_CHARACTERS = 64
"""Characters kept before the held-back text, for patterns with look-behind."""


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


@dataclass(frozen=True, slots=True)
class StopPattern:
    """A regular expression that ends the output.

    Attributes:
        source: as the client wrote it.
        compiled: pattern of the `regex` package, which has no types.
    """

    source: str
    compiled: Any

    @classmethod
    def of(cls, source: str) -> StopPattern:
        """Raises:
        InvalidArgument: it is no pattern, or matches the empty text.
        """
        try:
            pattern = cls(source, regex.compile(source, cache_pattern=False))
        except (regex.error, OverflowError, RecursionError) as error:
            message = f"{_STOP_REGEX} {source[:80]!r} is no regular expression: {error}"
            raise InvalidArgument.of("STOP_REGEX_INVALID", _STOP_REGEX, message) from error
        if pattern.search("", 0) is not None:
            message = (
                f"{_STOP_REGEX} {source[:80]!r} matches the empty text, so it would stop at once"
            )
            raise InvalidArgument.of("STOP_REGEX_INVALID", _STOP_REGEX, message)
        return pattern

    def search(self, text: str, start: int, *, partial: bool = False) -> tuple[int, int] | None:
        """Returns start and end of the first match at or after `start`.

        Args:
            partial: also find the beginning of a match at the end of the text.

        Raises:
            InvalidArgument: the search takes too long.
        """
        try:
            match = self.compiled.search(text, start, partial=partial, timeout=_SEARCH_TIMEOUT_S)
        except TimeoutError as error:
            message = (
                f"{_STOP_REGEX} {self.source[:80]!r} takes longer than {_SEARCH_TIMEOUT_S:g} s"
            )
            raise InvalidArgument.of("STOP_REGEX_SLOW", _STOP_REGEX, message) from error
        return None if match is None else match.span()


class StopPatterns:
    """Finds the first match of a stop string or of a pattern in streamed text.

    Text is held back only while it may be the beginning of a match. Used like `StopStrings`.

    Attributes:
        matched: the stop string, or the source of the pattern; None before a match.
    """

    def __init__(
        self, strings: StopStrings, patterns: Sequence[StopPattern], *, include_in_output: bool
    ) -> None:
        self._strings = strings
        self._patterns = tuple(patterns)
        self._include_in_output = include_in_output
        self._text = ""
        self._num_sent = 0
        self.matched: str | None = None

    def push(self, text: str) -> str:
        """Returns the text that is safe to send; after a match it is the last text.

        Raises:
            InvalidArgument: a pattern takes too long.
        """
        assert self.matched is None, "no text comes after a stop"
        self._text += self._strings.push(text)
        matches = [
            (end, start, pattern.source)
            for pattern in self._patterns
            if (span := pattern.search(self._text, self._num_sent)) is not None
            for start, end in [span]
        ]
        if matches:
            end, start, self.matched = min(matches)
            return self._send_to(end if self._include_in_output else start)
        self.matched = self._strings.matched
        return self._send_to(self._safe_end() if self.matched is None else len(self._text))

    def flush(self) -> str:
        """Returns the held-back text at the end of the output."""
        self._text += self._strings.flush()
        return self._send_to(len(self._text))

    def _send_to(self, end: int) -> str:
        text = self._text[self._num_sent : end]
        kept_from = max(end - _CONTEXT_CHARACTERS, 0)
        self._text, self._num_sent = self._text[kept_from:], end - kept_from
        return text

    def _safe_end(self) -> int:
        """Returns the index of the first character that may begin a match."""
        text, start = self._text, self._num_sent
        spans = [pattern.search(text, start, partial=True) for pattern in self._patterns]
        return min((span[0] for span in spans if span is not None), default=len(text))
