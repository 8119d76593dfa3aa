"""A `/generate` body as the completion it asks for."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from gateway.field_names import client_names
from gateway.generation import TargetModel
from gateway.native.schema import GenerateRequest, NativeSampling
from gateway.plan import Plan
from gateway.planner import Planner
from gateway.refusals import KnownFields, unimplemented
from gateway.schema import CompletionRequest, SamplingFields
from shared.errors import InvalidArgument

T = TypeVar("T")

_DEFAULT_NEW_TOKENS = 128  # SGLang's
_FIELDS = KnownFields(
    harmless=frozenset(
        {
            "background",
            "custom_labels",
            "data_parallel_rank",
            "log_metrics",
            "routed_dp_rank",
            "routing_key",
        }
    ),
    unimplemented=frozenset(
        {
            "audio_data",
            "bootstrap_host",
            "bootstrap_room",
            "custom_logit_processor",
            "image_data",
            "input_embeds",
            "lora_id",
            "lora_path",
            "return_hidden_states",
            "return_routed_experts",
            "session_params",
            "token_ids_logprob",
            "video_data",
        }
    ),
    neutral={"modalities": (["text"],)},
)
_SAMPLING_FIELDS = KnownFields(
    harmless=frozenset({"skip_tokenizer_init"}),
    unimplemented=frozenset({"beam_width", "custom_params"}),
    neutral={"spaces_between_special_tokens": (True,)},
)
_RENAMED = {"max_tokens": "max_new_tokens", "min_tokens": "min_new_tokens", "seed": "sampling_seed"}
_PROMPT_NAMES = {"prompt_logprob_start": "logprob_start_len"}
_CONSTRAINTS = ("regex", "ebnf", "json_schema", "structural_tag")
_SAME = (*SamplingFields.model_fields, *_CONSTRAINTS, "n")


@dataclass(frozen=True, slots=True)
class GeneratePlan:
    """A plan, and how `/generate` shows it.

    Attributes:
        is_batch: the answer is a list, and events of a stream have an index.
        num_top: alternatives per token; None without log probabilities.
        prompt_start: first prompt token with a log probability; None when none has.
        spells_tokens: whether log probabilities come with the tokens' text.
    """

    plan: Plan
    is_batch: bool
    num_top: int | None
    spells_tokens: bool
    prompt_start: int | None = None

    def id_of(self, index: int) -> str:
        """Returns `meta_info.id` of a choice."""
        return f"{self.plan.request_id}_{index}" if self.is_batch else self.plan.request_id


async def generate_plan(
    body: GenerateRequest, planner: Planner, name: str, model: TargetModel, trace_id: str
) -> GeneratePlan:
    """Raises:
    InvalidArgument: the request can never be served; by SGLang's name of the field.
    """
    sampling = _uniform("sampling_params", body.sampling_params) or NativeSampling()
    _FIELDS.refuse(body.unknown_fields)
    _SAMPLING_FIELDS.refuse(sampling.unknown_fields, "sampling_params.")
    num_top = _num_top(body)
    prompt, field = _prompt(body)
    names = {inside: f"sampling_params.{_RENAMED.get(inside, inside)}" for inside in _SAME}
    names |= {inside: f"sampling_params.{outside}" for inside, outside in _RENAMED.items()}
    with client_names({**names, "prompt": field, "logprobs": "top_logprobs_num", **_PROMPT_NAMES}):
        completion = _completion(body, sampling, prompt, num_top)
        start = _prompt_start(body, num_top)
        plan = await planner.completion(
            completion,
            name,
            model,
            trace_id,
            scored_from=start,
            default_tokens=_DEFAULT_NEW_TOKENS,
        )
    is_batch = len(plan.generations) > 1 or _is_batch(prompt)
    field = f"sampling_params.{plan.grammar_field}"
    plan = replace(
        plan,
        request_id=body.rid or uuid.uuid4().hex,
        grammar_field=field,
        generations=tuple(
            replace(each, logprobs_after_temperature=True) for each in plan.generations
        ),
    )
    return GeneratePlan(plan, is_batch, num_top, body.return_text_in_logprobs, start)


def _completion(
    body: GenerateRequest,
    sampling: NativeSampling,
    prompt: str | list[str] | list[int] | list[list[int]],
    num_top: int | None,
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
        cache_salt=salt,
        prediction=body.prediction,
        stream=body.stream,
        max_tokens=sampling.max_new_tokens,
        logprobs=num_top,
        speculation=body.speculation,
    )


def _prompt(body: GenerateRequest) -> tuple[str | list[str] | list[int] | list[list[int]], str]:
    """Returns the prompts and the field they came in."""
    if body.text is not None and body.input_ids is None:
        return body.text, "text"
    if body.input_ids is not None and body.text is None:
        return body.input_ids, "input_ids"
    message = "one of text and input_ids must be given"
    raise InvalidArgument.of("PROMPT_AMBIGUOUS", "text", message)


def _is_batch(prompt: str | Sequence[object]) -> bool:
    return not isinstance(prompt, str) and not isinstance(prompt[0], int)


def _num_top(body: GenerateRequest) -> int | None:
    if not _uniform("return_logprob", body.return_logprob):
        return None
    return _uniform("top_logprobs_num", body.top_logprobs_num) or 0


def _prompt_start(body: GenerateRequest, num_top: int | None) -> int | None:
    """Returns from where on the prompt's tokens are wanted; -1, SGLang's default, is of none."""
    start = _uniform("logprob_start_len", body.logprob_start_len)
    return None if num_top is None or start in (None, -1) else start


def _uniform(field: str, value: T | list[T] | None) -> T | None:
    """Returns the one value of a field that may have one for each prompt.

    Raises:
        InvalidArgument: they differ.
    """
    if not isinstance(value, list):
        return value
    if any(each != value[0] for each in value):
        raise unimplemented(field, f"{field} that differs within a batch")
    return value[0] if value else None
