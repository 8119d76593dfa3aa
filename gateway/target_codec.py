"""Messages of `outrider.target.v1` to and from the gateway's plain data."""

from __future__ import annotations

from collections.abc import Iterator

from gateway.failures import Aborted
from gateway.generation import Event, Finished, Generation, TargetModel
from shared.errors import FieldViolation, OutriderError, StatusCode, Unavailable, error_class
from shared.generation import Delta, DraftAnswer, Failed, PromptScored, RoundTrace, Started
from shared.pb.outrider.target.v1 import target_service_pb2 as pb
from shared.rpc.requests import grammar_message, sampling_message, stop_message, tree_from_message
from shared.tokens import FinishReason, TokenLogprobs, WeightChange

_FINISH_REASONS = {
    pb.FINISH_REASON_STOP: FinishReason.STOP,
    pb.FINISH_REASON_LENGTH: FinishReason.LENGTH,
}
_RETRYABLE = frozenset({StatusCode.RESOURCE_EXHAUSTED, StatusCode.UNAVAILABLE})


def is_retryable(error: OutriderError) -> bool:
    """Returns whether another target may do better."""
    return error.code in _RETRYABLE


def submit_message(request_id: int, generation: Generation) -> pb.SessionRequest:
    """Returns the message that starts a generation."""
    sampling = sampling_message(generation.sampling)
    if not generation.has_seed:
        sampling.ClearField("seed")
    request = pb.GenerateRequest(
        prompt_token_ids=generation.prompt_token_ids,
        sampling_params=sampling,
        stop_params=stop_message(generation.stop),
        top_logprob_count=generation.top_logprobs,
        priority=generation.priority,
        cache_salt=generation.cache_salt,
        predicted_token_ids=generation.predicted_token_ids,
        logprobs_after_temperature=generation.logprobs_after_temperature,
        logprob_token_ids=generation.logprob_token_ids,
        return_routed_experts=generation.wants_routes,
        speculation_params=pb.SpeculationParams(
            disabled=generation.speculation_disabled,
            trace=generation.wants_trace,
            algorithm=generation.draft_algorithm or "",
            step_count=generation.num_draft_steps,
            outcome_budget=generation.num_outcomes,
            draft_token_count=generation.num_draft_tokens,
            never_learnt=generation.never_learnt,
        ),
    )
    scoring = generation.prompt_scoring
    if scoring is not None:
        params = pb.PromptLogprobParams(
            start_position=scoring.start, top_logprob_count=scoring.num_top
        )
        request.prompt_logprob_params.CopyFrom(params)
    if generation.grammar is not None:
        request.grammar.CopyFrom(grammar_message(generation.grammar))
    submit = pb.Submit(
        request_id=request_id,
        request=request,
        trace_request_id=generation.request_id,
        traceparent=generation.traceparent or "",
    )
    if generation.timeout_s is not None:
        submit.timeout_duration.FromNanoseconds(round(generation.timeout_s * 1e9))
    return pb.SessionRequest(submit=submit)


def cancel_message(request_id: int) -> pb.SessionRequest:
    """Returns the message that aborts a generation."""
    return pb.SessionRequest(cancel=pb.Cancel(request_id=request_id))


def model_from_message(message: pb.GetModelResponse) -> TargetModel:
    """Returns what a target says it serves."""
    return TargetModel(
        model_id=message.model_id,
        tokenizer_sha256=message.tokenizer_sha256,
        max_context_tokens=message.max_context_token_count,
        vocab_size=message.vocab_size,
        eos_token_ids=frozenset(message.eos_token_ids),
        draft_algorithms=tuple(message.draft_algorithms),
        weight_version=message.weight_version,
        speculation_detail=message.speculation_detail,
        output_fingerprint=message.output_fingerprint,
        weight_changes=tuple(
            WeightChange(
                each.change_time.ToNanoseconds() / 1e9, each.algorithm, each.weight_version
            )
            for each in message.weight_changes
        ),
    )


def events_from_response(response: pb.SessionResponse) -> Iterator[tuple[int, Event]]:
    """Yields the events of one step, each with the id of its request, in order."""
    deltas, start = response.deltas, 0
    # There is a delta for every request and step: a slice of a column costs a tenth of a message.
    token_ids = deltas.token_ids[:]
    for request_id, num_tokens, num_accepted, num_drafted in zip(
        deltas.request_ids[:],
        deltas.token_counts[:],
        deltas.accepted_token_counts[:],
        deltas.drafted_token_counts[:],
        strict=True,
    ):
        end = start + num_tokens
        yield request_id, Delta(token_ids[start:end], (), num_accepted, num_drafted)
        start = end
    for message in response.events:
        event = _event(message)
        if event is not None:
            yield message.request_id, event


def _event(message: pb.SessionEvent) -> Event | None:
    """Returns the event; None for a kind that a newer target may send."""
    response = message.response
    kind = response.WhichOneof("event")
    if kind == "delta" and response.delta.token_ids:
        return _delta(response.delta)
    if kind == "started":
        queue_s = response.started.queue_duration.ToNanoseconds() / 1e9
        return Started(response.started.cached_token_count, queue_s)
    if kind == "prompt_logprobs":
        scored = response.prompt_logprobs
        return PromptScored(scored.start_position, [_logprobs(each) for each in scored.logprobs])
    if kind == "finished":
        return _finished(response.finished)
    return _failed(message.failure) if message.HasField("failure") else None


def _delta(message: pb.TokenDelta) -> Delta:
    return Delta(
        message.token_ids[:],
        [_logprobs(each) for each in message.logprobs],
        message.accepted_token_count,
        message.drafted_token_count,
        _round(message.trace) if message.HasField("trace") else None,
        message.weight_version if message.HasField("weight_version") else None,
    )


def _round(message: pb.RoundTrace) -> RoundTrace:
    has_answer = message.HasField("draft_duration")
    response_s = message.draft_duration.ToNanoseconds() / 1e9 if has_answer else None
    return RoundTrace(
        round=message.round,
        tree=tree_from_message(message.tree),
        accepted_nodes=tuple(message.accepted_node_indices),
        num_rows=message.row_count,
        verify_s=message.verify_duration.ToNanoseconds() / 1e9,
        wait_s=message.wait_duration.ToNanoseconds() / 1e9,
        draft=DraftAnswer(message.algorithm, response_s) if message.algorithm else None,
    )


def _logprobs(message: pb.TokenLogprobs) -> TokenLogprobs:
    top = tuple(zip(message.top_token_ids, message.top_log_probs, strict=True))
    return TokenLogprobs(message.log_prob, message.rank, top)


def _finished(message: pb.GenerationFinished) -> Finished | Failed:
    reason = _FINISH_REASONS.get(message.finish_reason)
    if reason is None:  # cancelled, but not by us: we forget a request when we cancel it
        name = pb.FinishReason.Name(message.finish_reason)
        if message.finish_reason == pb.FINISH_REASON_CANCELLED:
            return Failed(Aborted("an operator ended the request", reason="REQUEST_ABORTED"))
        return Failed(Unavailable(f"the target ended the request: {name}", reason=name))
    return Finished(
        reason=reason,
        num_output_tokens=message.output_token_count,
        num_cached_tokens=message.cached_token_count,
        stop_token_id=message.stop_token_id if message.HasField("stop_token_id") else None,
        routes=message.routed_experts,
    )


def _failed(message: pb.RequestFailure) -> Failed:
    violations = (FieldViolation(message.field, message.message),) if message.field else ()
    has_delay = message.HasField("retry_delay")
    error = error_class(message.code)(
        message.message,
        reason=message.reason,
        violations=violations,
        retry_after_s=message.retry_delay.ToNanoseconds() / 1e9 if has_delay else None,
    )
    return Failed(error, may_retry=message.code in _RETRYABLE)
