"""Converts protobuf messages to requests, and the engine's events to protobuf messages."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from google.protobuf.duration_pb2 import Duration

from services.target.requests.admission import RequestRecord
from services.target.requests.request import Event, Finished, GenerationRequest, ModelLimits
from shared.errors import OutriderError
from shared.generation import Delta, Failed, PromptScored, PromptScoring, RoundTrace, Started
from shared.pb.outrider.target.v1 import target_service_pb2 as pb
from shared.rpc.requests import sampling_from_message, stop_from_message, tree_message
from shared.sampling_defaults import OUTCOMES, TREE_STEPS, TREE_TOKENS, drawn_seed
from shared.tokens import FinishReason, TokenLogprobs


def generation_request(
    message: pb.GenerateRequest, record: RequestRecord, limits: ModelLimits, arrival_s: float
) -> GenerationRequest:
    """Returns the request without its grammar, which takes time to compile.

    Raises:
        InvalidArgument: a field is out of range.
    """
    limits.check_prompt(message.prompt_token_ids)
    wants_logprobs, params = message.HasField("top_logprob_count"), message.speculation_params
    scoring = message.prompt_logprob_params
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
        # A tree of one row has only its root.
        speculation_disabled=params.disabled or params.draft_token_count == 1,
        draft_algorithm=params.algorithm or None,
        num_draft_steps=TREE_STEPS.checked(params.step_count)
        if params.HasField("step_count")
        else None,
        num_draft_tokens=TREE_TOKENS.checked(params.draft_token_count)
        if params.HasField("draft_token_count")
        else None,
        num_outcomes=OUTCOMES.checked(params.outcome_budget)
        if params.HasField("outcome_budget")
        else None,
        wants_trace=params.trace,
        never_learnt=params.never_learnt,
        priority=message.priority,
        prompt_scoring=PromptScoring(scoring.start_position, scoring.top_logprob_count)
        if message.HasField("prompt_logprob_params")
        else None,
        logprobs_after_temperature=message.logprobs_after_temperature,
        cache_salt=message.cache_salt,
        logprob_token_ids=tuple(message.logprob_token_ids),
        predicted_token_ids=tuple(message.predicted_token_ids),
        wants_routes=message.return_routed_experts,
    )


_FINISH_REASONS = {
    FinishReason.STOP: pb.FINISH_REASON_STOP,
    FinishReason.LENGTH: pb.FINISH_REASON_LENGTH,
    FinishReason.CANCELLED: pb.FINISH_REASON_CANCELLED,
}


def response_message(event: Started | PromptScored | Delta | Finished) -> pb.GenerateResponse:
    """Returns the message of one event."""
    if isinstance(event, Delta):
        return pb.GenerateResponse(delta=_delta(event))
    if isinstance(event, PromptScored):
        logprobs = map(_logprobs, event.logprobs)
        scored = pb.PromptLogprobs(start_position=event.start, logprobs=logprobs)
        return pb.GenerateResponse(prompt_logprobs=scored)
    if isinstance(event, Started):
        queue_duration = duration_message(event.queue_s)
        started = pb.GenerationStarted(
            cached_token_count=event.num_cached_tokens, queue_duration=queue_duration
        )
        return pb.GenerateResponse(started=started)
    return pb.GenerateResponse(finished=_finished(event))


def session_responses(batch: Iterable[tuple[int, Event]]) -> Iterator[pb.SessionResponse]:
    """Yields the events of a session's requests, each with its request's id, in few messages.

    Plain deltas are sent as columns: every step has a delta for every request, and a message for
    each would cost twenty times as much. In a message the columns come before the events, so a
    delta that follows an event of the same request begins another message.
    """
    events, deltas, with_event = list[pb.SessionEvent](), list[tuple[int, Delta]](), set[int]()
    for key, event in batch:
        if isinstance(event, Delta) and event.is_plain:
            if key in with_event:
                yield _session_response(events, deltas)
                events, deltas, with_event = [], [], set()
            deltas.append((key, event))
            continue
        with_event.add(key)
        if isinstance(event, Failed):
            events.append(pb.SessionEvent(request_id=key, failure=_failure(event.error)))
        else:
            events.append(pb.SessionEvent(request_id=key, response=response_message(event)))
    if events or deltas:
        yield _session_response(events, deltas)


def _session_response(
    events: list[pb.SessionEvent], deltas: list[tuple[int, Delta]]
) -> pb.SessionResponse:
    """Returns a message of plain deltas and the events behind them. Each column is written at once;
    number by number it would cost four times as much."""
    if not deltas:
        return pb.SessionResponse(events=events)
    columns = pb.TokenDeltas(
        request_ids=[key for key, _ in deltas],
        token_counts=[len(delta.token_ids) for _, delta in deltas],
        token_ids=[token_id for _, delta in deltas for token_id in delta.token_ids],
        accepted_token_counts=[delta.num_accepted for _, delta in deltas],
        drafted_token_counts=[delta.num_drafted for _, delta in deltas],
    )
    return pb.SessionResponse(events=events, deltas=columns)


def _delta(delta: Delta) -> pb.TokenDelta:
    return pb.TokenDelta(
        trace=None if delta.trace is None else _trace(delta.trace),
        token_ids=delta.token_ids,
        logprobs=map(_logprobs, delta.logprobs),
        accepted_token_count=delta.num_accepted,
        drafted_token_count=delta.num_drafted,
        weight_version=delta.weight_version,
    )


def _trace(trace: RoundTrace) -> pb.RoundTrace:
    draft = trace.draft
    response_s = None if draft is None else draft.response_s
    return pb.RoundTrace(
        round=trace.round,
        tree=tree_message(trace.tree),
        accepted_node_indices=trace.accepted_nodes,
        row_count=trace.num_rows,
        verify_duration=duration_message(trace.verify_s),
        wait_duration=duration_message(trace.wait_s),
        algorithm=None if draft is None else draft.algorithm,
        draft_duration=None if response_s is None else duration_message(response_s),
    )


def duration_message(duration_s: float) -> Duration:
    """Returns a duration, rounded to nanoseconds."""
    duration = Duration()
    duration.FromNanoseconds(round(duration_s * 1e9))
    return duration


def _logprobs(logprobs: TokenLogprobs) -> pb.TokenLogprobs:
    return pb.TokenLogprobs(
        log_prob=logprobs.log_prob,
        rank=logprobs.rank,
        top_token_ids=[token_id for token_id, _ in logprobs.top],
        top_log_probs=[log_prob for _, log_prob in logprobs.top],
    )


def _finished(event: Finished) -> pb.GenerationFinished:
    stats = event.stats
    return pb.GenerationFinished(
        finish_reason=_FINISH_REASONS[event.reason],
        prompt_token_count=event.num_prompt_tokens,
        output_token_count=event.num_output_tokens,
        cached_token_count=event.num_cached_tokens,
        stop_token_id=event.stop_token_id,
        speculation=pb.SpeculationStats(
            round_count=stats.num_rounds,
            verified_round_count=stats.num_verified_rounds,
            drafted_token_count=stats.num_drafted,
            accepted_token_count=stats.num_accepted,
            missed_round_count=stats.num_missed_rounds,
            acceptance_histogram=stats.histogram,
        ),
        routed_experts=b"" if event.routes is None else event.routes.read().numpy().tobytes(),
    )


def _failure(error: OutriderError) -> pb.RequestFailure:
    delay_s = error.retry_after_s
    return pb.RequestFailure(
        code=int(error.code),
        reason=error.reason,
        message=error.message,
        field=error.violations[0].field if error.violations else "",
        retry_delay=None if delay_s is None else duration_message(delay_s),
    )
