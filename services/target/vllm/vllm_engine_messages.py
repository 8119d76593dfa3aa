"""The engine's answers as messages of the VllmEngine contract."""

from __future__ import annotations

from collections.abc import Sequence

from services.target.engine_gauges import EngineGauges
from services.target.requests.request import Delta, ModelLimits
from services.target.vllm.choice_output import ChoiceOutput
from services.target.vllm.model_facts import ModelFacts
from shared.pb.vllm.grpc.engine import vllm_engine_pb2 as pb
from shared.tokens import FinishReason, TokenLogprobs

_FINISH_REASONS = {
    FinishReason.STOP: "stop",
    FinishReason.LENGTH: "length",
    FinishReason.CANCELLED: "abort",
}


def chunk_message(choice: ChoiceOutput, delta: Delta) -> pb.GenerateResponse:
    """Returns the message of tokens that were added to an output last."""
    is_first = len(choice.token_ids) == len(delta.token_ids)
    chunk = pb.GenerateStreamChunk(
        token_ids=delta.token_ids,
        prompt_tokens=len(choice.request.prompt_token_ids),
        completion_tokens=len(delta.token_ids),
        cached_tokens=choice.num_cached_tokens,
        output_logprobs=_output_logprobs(choice, delta.token_ids, delta.logprobs),
        input_logprobs=_input_logprobs(choice) if is_first else None,
        index=choice.index,
    )
    return pb.GenerateResponse(chunk=chunk)


def complete_message(choice: ChoiceOutput, *, is_streamed: bool) -> pb.GenerateResponse:
    """Returns the message of an output that has ended.

    Args:
        is_streamed: log probabilities went out with the tokens.
    """
    finished = choice.finished
    assert finished is not None
    complete = pb.GenerateComplete(
        output_ids=choice.token_ids,
        finish_reason=_FINISH_REASONS[finished.reason],
        prompt_tokens=len(choice.request.prompt_token_ids),
        completion_tokens=len(choice.token_ids),
        cached_tokens=choice.num_cached_tokens,
        index=choice.index,
        spec_accepted_tokens=choice.num_accepted,
        spec_draft_tokens=choice.num_drafted,
    )
    if not is_streamed:
        output = _output_logprobs(choice, choice.token_ids, choice.logprobs)
        prompt = _input_logprobs(choice)
        complete.MergeFrom(pb.GenerateComplete(output_logprobs=output, input_logprobs=prompt))
    if choice.stop_string is not None:
        complete.matched_stop_str = choice.stop_string
    elif finished.stop_token_id in choice.request.stop.stop_token_ids:
        complete.matched_token_id = finished.stop_token_id
    return pb.GenerateResponse(complete=complete)


def _output_logprobs(
    choice: ChoiceOutput, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs]
) -> pb.OutputLogProbs | None:
    if choice.request.top_logprobs is None:
        return None
    tops = map(_top, logprobs) if choice.request.top_logprobs else ()
    return pb.OutputLogProbs(
        token_logprobs=[each.log_prob for each in logprobs], token_ids=token_ids, top_logprobs=tops
    )


def _input_logprobs(choice: ChoiceOutput) -> pb.InputLogProbs | None:
    scoring = choice.request.prompt_scoring
    if scoring is None:
        return None
    scores = choice.prompt_scores
    first = pb.InputTokenLogProb()
    tops = [pb.TopLogProbs(), *map(_top, scores)] if scoring.num_top else ()
    return pb.InputLogProbs(
        token_logprobs=[first, *(pb.InputTokenLogProb(value=each.log_prob) for each in scores)],
        token_ids=choice.request.prompt_token_ids[: len(scores) + 1],
        top_logprobs=tops,
    )


def _top(logprobs: TokenLogprobs) -> pb.TopLogProbs:
    return pb.TopLogProbs(
        values=[log_prob for _, log_prob in logprobs.top],
        token_ids=[token_id for token_id, _ in logprobs.top],
    )


def model_info_message(facts: ModelFacts, limits: ModelLimits) -> pb.GetModelInfoResponse:
    """Returns what is served."""
    return pb.GetModelInfoResponse(
        model_path=facts.model_id,
        served_model_name=facts.model_id,
        is_generation=True,
        max_context_length=limits.max_sequence_tokens,
        max_req_input_len=limits.max_sequence_tokens - 1,
        vocab_size=limits.vocab_size,
        model_type=facts.model_type,
        architectures=facts.architectures,
        eos_token_ids=sorted(limits.eos_token_ids),
        pad_token_id=facts.pad_token_id,
        bos_token_id=facts.bos_token_id,
        default_sampling_params_json=facts.sampling_defaults,
    )


def load_message(gauges: EngineGauges, facts: ModelFacts) -> pb.SchedulerLoad:
    """Returns how busy the engine is."""
    return pb.SchedulerLoad(
        num_running_reqs=gauges.num_running,
        num_waiting_reqs=gauges.num_waiting,
        num_total_reqs=gauges.num_running + gauges.num_waiting,
        num_used_tokens=gauges.num_held_pages * facts.page_size,
        max_total_num_tokens=gauges.num_pages * facts.page_size,
        token_usage=gauges.num_held_pages / gauges.num_pages,
        utilization=gauges.num_running / facts.max_running,
        max_running_requests=facts.max_running,
    )
