"""Request fields to sampling and stop parameters, with the model's defaults and limits applied."""

from __future__ import annotations

from typing import TypeVar

from gateway.generation import TargetModel
from gateway.schema import GenerationBody, Speculation
from shared.errors import InvalidArgument
from shared.sampling_defaults import SamplingDefaults
from shared.tokens import MAX_TOP_LOGPROBS, SamplingParams, StopParams

T = TypeVar("T")

_SEED_LIMIT = 2**63
_MAX_ALGORITHM_CHARACTERS = 64
_INT32_LIMIT = 2**31


def sampling_params(
    body: GenerationBody, defaults: SamplingDefaults, model: TargetModel
) -> SamplingParams:
    """Raises:
    InvalidArgument: a value is out of its range; names the field.
    """
    bias = body.logit_bias or {}
    _check_token_ids("logit_bias", bias, model)
    seed = 0 if body.seed is None else body.seed
    if not -_SEED_LIMIT <= seed < _SEED_LIMIT:
        raise InvalidArgument.out_of_range("seed", seed, "[-2^63, 2^63)")
    top_k = _given(body.top_k, defaults.top_k)
    if top_k >= _INT32_LIMIT:
        raise InvalidArgument.out_of_range("top_k", top_k, "[-1, 2^31)")
    return SamplingParams(
        temperature=_given(body.temperature, defaults.temperature),
        top_k=0 if top_k == -1 else top_k,
        top_p=_given(body.top_p, defaults.top_p),
        min_p=_given(body.min_p, defaults.min_p),
        frequency_penalty=_given(body.frequency_penalty, 0.0),
        presence_penalty=_given(body.presence_penalty, 0.0),
        repetition_penalty=_given(body.repetition_penalty, defaults.repetition_penalty),
        logit_bias=bias,
        seed=seed,
    )


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
    stop_token_ids = body.stop_token_ids or []
    _check_token_ids("stop_token_ids", stop_token_ids, model)
    num_left = model.max_context_tokens - num_prompt_tokens
    asked = StopParams(
        max_output_tokens=_given(max_tokens, num_left),
        min_output_tokens=_given(body.min_tokens, 0),
        stop_token_ids=frozenset(stop_token_ids),
        ignore_eos=body.ignore_eos,
    )
    return asked.within(num_left)


def check_top_logprobs(field: str, value: int) -> int:
    """Raises:
    InvalidArgument: more are asked for than a target computes.
    """
    if not 0 <= value <= MAX_TOP_LOGPROBS:
        raise InvalidArgument.out_of_range(field, value, f"[0, {MAX_TOP_LOGPROBS}]")
    return value


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


def _check_token_ids(
    field: str, token_ids: list[int] | dict[int, float], model: TargetModel
) -> None:
    for token_id in token_ids:
        if not 0 <= token_id < model.vocab_size:
            raise InvalidArgument.out_of_range(field, token_id, f"[0, {model.vocab_size})")


def _given(value: T | None, default: T) -> T:
    return default if value is None else value
