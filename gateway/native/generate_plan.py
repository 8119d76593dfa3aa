"""A `/generate` body as the completion it asks for."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from gateway.field_names import client_names
from gateway.generation import TargetModel
from gateway.native.schema import GenerateRequest, NativeSampling
from gateway.plan import Plan
from gateway.planner import Planner
from gateway.refusals import KnownFields, unimplemented
from gateway.schema import CompletionRequest, SamplingFields
from shared.errors import InvalidArgument

_Prompt = str | list[str] | list[int] | list[list[int]]

_DEFAULT_NEW_TOKENS = 128  # SGLang's
_FIELDS = KnownFields.of_generation(
    harmless=frozenset(
        {
            "background",
            "custom_labels",
            "data_parallel_rank",
            "include_reasoning",
            "log_metrics",
            "routed_dp_rank",
            "routing_key",
            "separate_reasoning",
        }
    ),
    unimplemented=frozenset(
        {
            "audio_data",
            "bootstrap_host",
            "bootstrap_room",
            "image_data",
            "return_routed_experts",
            "video_data",
        }
    ),
)
_SAMPLING_FIELDS = KnownFields.of_generation(
    # Fast tokenizers put no space between special tokens, whatever is asked for.
    harmless=frozenset({"skip_tokenizer_init", "spaces_between_special_tokens"}),
    unimplemented=frozenset({"beam_width"}),
)
_RENAMED = {"max_tokens": "max_new_tokens", "min_tokens": "min_new_tokens", "seed": "sampling_seed"}
_PROMPT_NAMES = {"prompt_logprob_start": "logprob_start_len"}
_CONSTRAINTS = ("regex", "ebnf", "json_schema", "structural_tag")
_SAME = (*SamplingFields.model_fields, *_CONSTRAINTS, "n")


@dataclass(frozen=True, slots=True)
class WantedScores:
    """Log probabilities of a prompt's outputs.

    Attributes:
        num_top: alternatives per token; None without log probabilities.
        start: first prompt token with a log probability; None when none has.
        named: further tokens to report; None where it is not asked for.
    """

    num_top: int | None
    start: int | None
    named: tuple[int, ...] | None


@dataclass(frozen=True, slots=True)
class GeneratePlan:
    """A plan, and how `/generate` shows it.

    Attributes:
        is_batch: the answer is a list, and events of a stream have an index.
        scores: the log probabilities of each prompt.
        spells_tokens: whether log probabilities come with the tokens' text.
    """

    plan: Plan
    is_batch: bool
    scores: tuple[WantedScores, ...]
    spells_tokens: bool

    def scores_of(self, index: int) -> WantedScores:
        """Returns what a choice tells of its tokens."""
        return self.scores[index // self.plan.num_choices]

    def id_of(self, index: int) -> str:
        """Returns `meta_info.id` of a choice."""
        return f"{self.plan.request_id}_{index}" if self.is_batch else self.plan.request_id


async def generate_plan(
    body: GenerateRequest, planner: Planner, name: str, model: TargetModel, trace_id: str
) -> GeneratePlan:
    """Raises:
    InvalidArgument: the request can never be served; by SGLang's name of the field.
    """
    _FIELDS.refuse(body.unknown_fields)
    prompt, field = _prompt(body)
    is_many = _is_batch(prompt)
    count = max(len(prompt), 1) if is_many else 1
    samplings = _each("sampling_params", body.sampling_params, count)
    scores = _scores(body, count)
    asked = [(each or NativeSampling(), own) for each, own in zip(samplings, scores, strict=True)]
    for sampling, _ in asked:
        _SAMPLING_FIELDS.refuse(sampling.unknown_fields, "sampling_params.")
    names = {inside: f"sampling_params.{_RENAMED.get(inside, inside)}" for inside in _SAME}
    names |= {inside: f"sampling_params.{outside}" for inside, outside in _RENAMED.items()}
    if body.return_routed_experts and any(sampling.stop for sampling, _ in asked):
        # Text that ends an output is found here, before the target has told anything.
        message = "return_routed_experts is true; stop cannot be set beside it, stop_token_ids can"
        raise InvalidArgument.of("ROUTED_EXPERTS_STOP", "return_routed_experts", message)
    names |= {"logprobs": "top_logprobs_num", "logprob_token_ids": "token_ids_logprob"}
    with client_names({**names, "prompt": field, **_PROMPT_NAMES}):
        if all(each == asked[0] for each in asked):
            parts = [prompt]
        else:
            planner.limits.check_prompts(count)
            parts = _alone(prompt)
        plans = [
            await planner.completion(
                _completion(body, sampling, part, own),
                name,
                model,
                trace_id,
                scored_from=own.start,
                default_tokens=_DEFAULT_NEW_TOKENS,
                keeps_likeliest=True,
            )
            for part, (sampling, own) in zip(parts, asked, strict=False)
        ]
        plan = _joined(plans, planner)
    is_batch = len(plan.generations) > 1 or is_many
    field = f"sampling_params.{plan.grammar_field}"
    plan = replace(
        plan,
        request_id=body.rid or uuid.uuid4().hex,
        grammar_field=field,
        generations=tuple(
            replace(
                each,
                logprobs_after_temperature=True,
                wants_routes=body.return_routed_experts,
            )
            for each in plan.generations
        ),
    )
    return GeneratePlan(plan, is_batch, scores, body.return_text_in_logprobs)


def _alone(prompt: _Prompt) -> list[_Prompt]:
    """Returns each prompt of a batch as a batch of its own."""
    assert not isinstance(prompt, str)
    texts = [each for each in prompt if isinstance(each, str)]
    tokens = [each for each in prompt if isinstance(each, list)]
    return [*([each] for each in texts), *([each] for each in tokens)]


def _joined(plans: Sequence[Plan], planner: Planner) -> Plan:
    """Returns one plan of several prompts, each with its own settings.

    Raises:
        InvalidArgument: they ask for different numbers of choices, or for too many.
    """
    first = plans[0]
    if any(each.num_choices != first.num_choices for each in plans):
        raise unimplemented("n", "n that differs within a batch")
    if len(plans) == 1:
        return first
    planner.limits.check_choices(first.num_choices, len(plans))
    return replace(
        first,
        generations=tuple(generation for each in plans for generation in each.generations),
        texts=tuple(each.text for each in plans for _ in each.generations),
    )


def _completion(
    body: GenerateRequest,
    sampling: NativeSampling,
    prompt: _Prompt,
    scores: WantedScores,
) -> CompletionRequest:
    given = {name: getattr(sampling, name) for name in _SAME}
    renamed = {"min_tokens": sampling.min_new_tokens, "seed": sampling.sampling_seed}
    salt = body.extra_key if body.cache_salt is None else body.cache_salt
    given |= {name: value for name, value in renamed.items() if value is not None}
    return CompletionRequest(
        **given,
        prompt=prompt,
        priority=body.priority,
        truncate_prompt_tokens=body.truncate_prompt_tokens,
        truncation_side=body.truncation_side,
        cache_salt=salt,
        prediction=body.prediction,
        stream=body.stream,
        max_tokens=sampling.max_new_tokens,
        logprobs=scores.num_top,
        logprob_token_ids=None if scores.named is None else list(scores.named),
        speculation=body.speculation,
    )


def _prompt(body: GenerateRequest) -> tuple[_Prompt, str]:
    """Returns the prompts and the field they came in."""
    if body.text is not None and body.input_ids is None:
        return body.text, "text"
    if body.input_ids is not None and body.text is None:
        return body.input_ids, "input_ids"
    message = "one of text and input_ids must be given"
    raise InvalidArgument.of("PROMPT_AMBIGUOUS", "text", message)


def _is_batch(prompt: str | Sequence[object]) -> bool:
    return not isinstance(prompt, str) and not (prompt and isinstance(prompt[0], int))


def _scores(body: GenerateRequest, count: int) -> tuple[WantedScores, ...]:
    """Returns the log probabilities that each prompt is to have; a start of -1, SGLang's default,
    is behind the prompt."""
    wants = _each("return_logprob", body.return_logprob, count)
    tops = _each("top_logprobs_num", body.top_logprobs_num, count)
    starts = _each("logprob_start_len", body.logprob_start_len, count)
    given: Any = body.token_ids_logprob
    if given is not None and all(isinstance(each, int) for each in given):
        given = [given] * count
    named = _each("token_ids_logprob", given, count)
    found = []
    for is_wanted, top, start, ids in zip(wants, tops, starts, named, strict=True):
        if not is_wanted:
            found.append(WantedScores(None, None, None))
            continue
        own = tuple(dict.fromkeys(ids)) if isinstance(ids, list) else None
        found.append(WantedScores(top or 0, None if start in (None, -1) else start, own))
    return tuple(found)


def _each(field: str, value: Any, count: int) -> list[Any]:
    """Returns the value of a field for each prompt; one alone is for all.

    Raises:
        InvalidArgument: it has other values than prompts.
    """
    if not isinstance(value, list):
        return [value] * count
    if len(value) != count:
        message = f"{field} has {len(value)} entries for {count} prompts"
        raise InvalidArgument.of("FIELD_INVALID", field, message)
    return value
