"""From the message of a request to the request that the engine takes."""

from __future__ import annotations

from services.target.control.adaptive_config import MAX_DRAFT_TOKENS, MAX_STEPS
from services.target.drafts.assignment import MAX_CONDITIONAL_CANDIDATES
from services.target.requests.request import GenerationRequest, ModelLimits, PromptScoring
from services.target.requests.request_record import RequestRecord
from shared.errors import InvalidArgument
from shared.pb.outrider.target.v1 import target_service_pb2 as pb
from shared.rpc.sampling import sampling_from_message, stop_from_message
from shared.seeds import drawn_seed


def generation_request(
    message: pb.GenerateRequest, record: RequestRecord, limits: ModelLimits, arrival_s: float
) -> GenerationRequest:
    """Reads everything but the grammar, which takes time to compile.

    Raises:
        InvalidArgument: a field is out of its range.
    """
    limits.check_prompt(message.prompt_token_ids)
    wants_logprobs = message.HasField("top_logprob_count")
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
        speculation_disabled=_is_disabled(message.speculation_params),
        draft_algorithm=message.speculation_params.algorithm or None,
        num_draft_steps=_draft_steps(message.speculation_params),
        num_draft_tokens=_draft_tokens(message.speculation_params),
        num_outcomes=_outcome_budget(message.speculation_params),
        wants_trace=message.speculation_params.trace,
        priority=message.priority,
        prompt_scoring=_prompt_scoring(message),
    )


def _is_disabled(params: pb.SpeculationParams) -> bool:
    """A tree that is its root alone is not worth a draft's while."""
    return params.disabled or _draft_tokens(params) == 1


def _draft_steps(params: pb.SpeculationParams) -> int | None:
    if not params.HasField("step_count"):
        return None
    if not 1 <= params.step_count <= MAX_STEPS:
        raise InvalidArgument.out_of_range(
            "speculation.num_steps", params.step_count, f"[1, {MAX_STEPS}]"
        )
    return params.step_count


def _draft_tokens(params: pb.SpeculationParams) -> int | None:
    if not params.HasField("draft_token_count"):
        return None
    if not 1 <= params.draft_token_count <= MAX_DRAFT_TOKENS:
        raise InvalidArgument.out_of_range(
            "speculation.num_draft_tokens", params.draft_token_count, f"[1, {MAX_DRAFT_TOKENS}]"
        )
    return params.draft_token_count


def _outcome_budget(params: pb.SpeculationParams) -> int | None:
    if not params.HasField("outcome_budget"):
        return None
    if not 0 <= params.outcome_budget <= MAX_CONDITIONAL_CANDIDATES:
        raise InvalidArgument.out_of_range(
            "speculation.outcome_budget",
            params.outcome_budget,
            f"[0, {MAX_CONDITIONAL_CANDIDATES}]",
        )
    return params.outcome_budget


def _prompt_scoring(message: pb.GenerateRequest) -> PromptScoring | None:
    if not message.HasField("prompt_logprob_params"):
        return None
    params = message.prompt_logprob_params
    return PromptScoring(params.start_position, params.top_logprob_count)
