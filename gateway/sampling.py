"""Request fields to sampling and stop parameters, with the model's defaults and limits applied."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import asdict, fields

from gateway.generation import TargetModel
from gateway.notices import give_notice
from gateway.schema import GenerationBody, SamplingFields, Speculation
from shared.errors import InvalidArgument
from shared.sampling_defaults import SamplingDefaults
from shared.text import Tokenizer
from shared.tokens import (
    MAX_BAD_WORDS,
    MAX_NAMED_LOGPROBS,
    MAX_SALT_CHARACTERS,
    MAX_TOP_LOGPROBS,
    SamplingParams,
    StopParams,
    ThinkingBudget,
)

_NAMES = {field.name for field in fields(SamplingParams)} & SamplingFields.model_fields.keys()
_MAX_BAD_WORDS = MAX_BAD_WORDS // 2  # each has two spellings
_MAX_WORD_CHARACTERS = 64
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
        _check_token_ids(name, token_ids, model)
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


def stop_params(
    body: GenerationBody, max_tokens: int | None, num_prompt_tokens: int, model: TargetModel
) -> StopParams:
    """Returns when to stop, clamped to what the context leaves after the prompt.

    Args:
        max_tokens: None is all the context leaves.

    Raises:
        InvalidArgument: the prompt is empty or fills the context, or a value is out of range.
    """
    if num_prompt_tokens == 0:
        raise InvalidArgument.prompt_empty()
    if num_prompt_tokens >= model.max_context_tokens:
        raise InvalidArgument.prompt_too_long(num_prompt_tokens, model.max_context_tokens - 1)
    stop_token_ids = _drawable(body.stop_token_ids or (), model)
    num_left = model.max_context_tokens - num_prompt_tokens
    asked = StopParams(
        max_output_tokens=num_left if max_tokens is None else max_tokens,
        min_output_tokens=body.min_tokens or 0,
        stop_token_ids=frozenset(stop_token_ids),
        ignore_eos=body.ignore_eos,
    )
    return asked.within(num_left)


def _drawable(stop_token_ids: Sequence[int], model: TargetModel) -> Sequence[int]:
    """Returns those that are tokens; others, perhaps of another model, end nothing."""
    tokens = [token_id for token_id in stop_token_ids if 0 <= token_id < model.vocab_size]
    if len(tokens) < len(stop_token_ids):
        give_notice(f"ids of stop_token_ids outside [0, {model.vocab_size}) have no effect")
    return tokens


def check_top_logprobs(field: str, value: int) -> int:
    """Raises:
    InvalidArgument: more are asked for than a target computes.
    """
    if not 0 <= value <= MAX_TOP_LOGPROBS:
        raise InvalidArgument.out_of_range(field, value, f"[0, {MAX_TOP_LOGPROBS}]")
    return value


def check_named(token_ids: Sequence[int], model: TargetModel) -> tuple[int, ...]:
    """Returns tokens whose log probabilities are wanted, each once.

    Raises:
        InvalidArgument: there are too many, or one is none.
    """
    named = tuple(dict.fromkeys(token_ids))
    if len(named) > MAX_NAMED_LOGPROBS:
        limit = f"at most {MAX_NAMED_LOGPROBS}"
        raise InvalidArgument.wrong_count("logprob_token_ids", len(named), "tokens", limit)
    _check_token_ids("logprob_token_ids", named, model)
    return named


def check_algorithm(speculation: Speculation) -> str | None:
    """Returns the algorithm as drafts spell it; whether there is one is the target's to say.

    Raises:
        InvalidArgument: it cannot be the name of one.
    """
    name = speculation.algorithm
    if name is None:
        return None
    if not 1 <= len(name) <= _MAX_ALGORITHM_CHARACTERS:
        message = (
            f"speculation.algorithm has {len(name)} characters; "
            f"it must have [1, {_MAX_ALGORITHM_CHARACTERS}]"
        )
        raise InvalidArgument.of("ALGORITHM_UNKNOWN", "speculation.algorithm", message)
    return name.upper()


def check_priority(priority: int | None) -> int:
    """Returns whose turn it is; 0 where nothing is said.

    Raises:
        InvalidArgument: it does not fit the wire.
    """
    priority = priority or 0
    if not -_INT32_LIMIT <= priority < _INT32_LIMIT:
        raise InvalidArgument.out_of_range("priority", priority, "[-2^31, 2^31)")
    return priority


def check_salt(salt: str | None) -> str:
    """Returns the salt; empty where there is none.

    Raises:
        InvalidArgument: it is empty or too long.
    """
    if salt is not None and not 1 <= len(salt) <= MAX_SALT_CHARACTERS:
        limit = f"[1, {MAX_SALT_CHARACTERS}]"
        raise InvalidArgument.wrong_count("cache_salt", len(salt), "characters", limit)
    return salt or ""


def _check_token_ids(field: str, token_ids: Collection[int], model: TargetModel) -> None:
    for token_id in token_ids:
        if not 0 <= token_id < model.vocab_size:
            message = f"{field} holds token {token_id}; ids must be in [0, {model.vocab_size})"
            raise InvalidArgument.of("SAMPLING_PARAM_OUT_OF_RANGE", field, message)
