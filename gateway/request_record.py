"""Metrics, one log line and one span for each HTTP request."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

from gateway.choice import Choice
from gateway.generation import Delta
from gateway.inbox import Aborted, ClientGone, ClientTooSlow
from gateway.metrics import GatewayMetrics, RequestTimes
from gateway.plan import Plan
from gateway.quota import current_quota
from shared.errors import OutriderError
from shared.telemetry.request_id import current_traceparent
from shared.telemetry.tracing import NO_TRACER, Span, Tracer
from shared.telemetry.vllm_metrics import RequestFigures

_log = logging.getLogger(__name__)


class RequestRecord:
    """Records one request from its plan to its end."""

    def __init__(
        self, endpoint: str, plan: Plan, metrics: GatewayMetrics, tracer: Tracer = NO_TRACER
    ) -> None:
        self._endpoint = endpoint
        self._plan = plan
        self._metrics = metrics
        self._tracer = tracer
        self._times = RequestTimes(time.perf_counter())
        self._figures: list[RequestFigures] = []
        self._span: Span | None = None

    @property
    def traceparent(self) -> str | None:
        """Parent of the target's span."""
        return None if self._span is None else self._span.traceparent

    def begin(self) -> None:
        """Called before the request is sent to its targets."""
        plan = self._plan
        self._span = self._tracer.begin(
            f"gateway.{self._endpoint}",
            current_traceparent.get(),
            {
                "outrider.request_id": plan.generations[0].trace_id,
                "gen_ai.request.model": plan.model,
                "gen_ai.usage.input_tokens": plan.num_prompt_tokens,
            },
        )
        vllm, now_s = self._metrics.vllm, self._times.begin_s
        self._figures = [vllm.begin(plan.model, now_s) for _ in plan.generations]

    def started(self, choice: Choice) -> None:
        """Called when a choice left the target's queue."""
        self._metrics.vllm.start(
            self._figures[choice.index],
            choice.num_cached_tokens,
            time.perf_counter(),
        )

    def tokens(self, choice: Choice, delta: Delta) -> None:
        """Called when tokens of a choice arrived."""
        now_s, num_tokens = time.perf_counter(), len(delta.token_ids)
        if self._times.first_token_s is None:
            self._times.first_token_s = now_s
            self._times.num_first_tokens = num_tokens
            assert self._span is not None, "begun before its first token"
            self._span.event("first_token")
        vllm, figures = self._metrics.vllm, self._figures[choice.index]
        vllm.tokens(figures, num_tokens, now_s)
        if delta.num_drafted:
            vllm.verified(figures, delta.num_drafted, delta.num_accepted)

    def end(self, choices: Sequence[Choice], error: BaseException | None) -> None:
        """Called after the last byte, or when the client is gone."""
        plan, outcome = self._plan, _outcome(error)
        self._metrics.end(self._endpoint, self._times, plan, choices, outcome)
        for choice, figures in zip(choices, self._figures, strict=True):
            num_prompt = len(plan.generations[choice.index].prompt_token_ids)
            reason = _vllm_reason(choice, outcome)
            self._metrics.vllm.end(figures, num_prompt, reason)
        num_output = sum(choice.num_output_tokens for choice in choices)
        facts: dict[str, str | int | float] = {
            "endpoint": self._endpoint,
            "outcome": outcome,
            "num_prompt": plan.num_prompt_tokens,
            "num_output": num_output,
            "num_accepted": sum(choice.num_accepted for choice in choices),
            "duration_s": round(time.perf_counter() - self._times.begin_s, 6),
        }
        if self._times.first_token_s is not None:
            facts["first_token_s"] = round(self._times.first_token_s - self._times.begin_s, 6)
        if (quota := current_quota.get()) is not None:
            facts["client"] = quota.name
        _log.info("request ended", extra=facts)
        if self._span is not None:
            attributes = {f"outrider.{name}": value for name, value in facts.items()}
            attributes["gen_ai.usage.output_tokens"] = num_output
            self._span.end(attributes, None if outcome == "finished" else _reason(error, outcome))


def _outcome(error: BaseException | None) -> str:
    if error is None:
        return "finished"
    names: dict[type, str] = {
        ClientGone: "client_gone",
        ClientTooSlow: "client_too_slow",
        Aborted: "aborted",
    }
    # A stream that failed raises another error, with the failure as its cause.
    known = (names[kind] for kind in (type(error), type(error.__cause__)) if kind in names)
    return next(known, "failed")


def _reason(error: BaseException | None, outcome: str) -> str:
    told = (each.reason for each in (error, getattr(error, "__cause__", None))
            if isinstance(each, OutriderError))  # fmt: skip
    return next(told, outcome)


def _vllm_reason(choice: Choice, outcome: str) -> str:
    if choice.finish_reason is not None:
        return choice.finish_reason.value
    return "error" if outcome == "failed" else "abort"
