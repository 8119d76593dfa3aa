"""From the message of a request to the request that the engine takes."""

from __future__ import annotations

from typing import Literal

from services.target.requests.request import GenerationRequest, ModelLimits, PromptScoring
from services.target.requests.request_record import RequestRecord
from shared.pb.outrider.target.v1 import target_service_pb2 as pb
from shared.rpc.sampling import sampling_from_message, stop_from_message
from shared.seeds import drawn_seed
from shared.speculation_limits import OUTCOMES, TREE_STEPS, TREE_TOKENS, IntegerLimit

LimitedField = Literal["step_count", "draft_token_count", "outcome_budget"]


def generation_request(
    message: pb.GenerateRequest, record: RequestRecord, limits: ModelLimits, arrival_s: float
) -> GenerationRequest:
    """Reads everything but the grammar, which takes time to compile.

    Raises:
        InvalidArgument: a field is out of its range.
    """
    limits.check_prompt(message.prompt_token_ids)
    wants_logprobs, params = message.HasField("top_logprob_count"), message.speculation_params
    return GenerationRequest(
        request_id=record.request_id,
        traceparent=record.traceparent,
        prompt_token_ids=tuple(message.prompt_token_ids),
        sampling=sampling_from_message(message.sampling_params, draw_seed=drawn_seed),
        stop=stop_from_message(
            message.stop_params,
            max_output_tokens=limits.max_sequence_tokens - len(message.prompt_token_ids),
        ),
        arrival_s=arrival_s,
        top_logprobs=message.top_logprob_count if wants_logprobs else None,
        speculation_disabled=_is_disabled(params),
        draft_algorithm=params.algorithm or None,
        num_draft_steps=_limited(params, "step_count", TREE_STEPS),
        num_draft_tokens=_limited(params, "draft_token_count", TREE_TOKENS),
        num_outcomes=_limited(params, "outcome_budget", OUTCOMES),
        wants_trace=params.trace,
        never_learnt=params.never_learnt,
        priority=message.priority,
        prompt_scoring=_prompt_scoring(message),
        logprobs_after_temperature=message.logprobs_after_temperature,
        cache_salt=message.cache_salt,
        logprob_token_ids=tuple(message.logprob_token_ids),
        predicted_token_ids=tuple(message.predicted_token_ids),
        wants_routes=message.return_routed_experts,
    )


def _is_disabled(params: pb.SpeculationParams) -> bool:
    """Whether the request asks for no trees: a tree of one row is only its root."""
    return params.disabled or params.draft_token_count == 1


def _limited(params: pb.SpeculationParams, field: LimitedField, limit: IntegerLimit) -> int | None:
    return limit.checked(getattr(params, field)) if params.HasField(field) else None


def _prompt_scoring(message: pb.GenerateRequest) -> PromptScoring | None:
    if not message.HasField("prompt_logprob_params"):
        return None
    params = message.prompt_logprob_params
    return PromptScoring(params.start_position, params.top_logprob_count)
