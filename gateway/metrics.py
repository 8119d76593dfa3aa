"""The gateway's metrics: every counter, gauge and histogram with its unit and meaning; and the
record of one request in metrics, log line and span.

Names are without the `_total` that Prometheus adds to counters. Nothing here runs per token:
requests are observed when they begin, at each step and when they end."""

from __future__ import annotations

import logging
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from gateway.api_keys import Quotas, current_quota
from gateway.choice import Choice
from gateway.failures import Aborted, ClientGone, ClientTooSlow
from gateway.generation import TargetState
from gateway.planner import Plan
from gateway.pool import TargetPool
from shared.errors import OutriderError
from shared.generation import Delta, SpeculationStats
from shared.rpc.admin_client import TargetStatus
from shared.telemetry.tracing import Tracer, current_traceparent
from shared.telemetry.vllm_metrics import VllmMetrics

INTERVAL_S = 15
NUM_INTERVALS = 120

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
_LATENCIES = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1)
_Family = CounterMetricFamily | GaugeMetricFamily
_OUTCOMES: dict[type, str] = {
    ClientGone: "client_gone",
    ClientTooSlow: "client_too_slow",
    Aborted: "aborted",
}
_log = logging.getLogger(__name__)


@dataclass(slots=True)
class Interval:
    """Running speculation counters of the requests that end within one interval.

    Attributes:
        number: number of the interval, counted from the epoch.
        num_verified_rounds, num_accepted: as in `SpeculationStats`.
    """

    number: int
    num_verified_rounds: int = 0
    num_accepted: int = 0

    @property
    def begin_s(self) -> int:
        """Seconds since the epoch."""
        return self.number * INTERVAL_S

    @property
    def mean_accepted_length(self) -> float | None:
        """Tokens a verified round committed, bonus token included; None before the first."""
        if self.num_verified_rounds == 0:
            return None
        return 1 + self.num_accepted / self.num_verified_rounds


class AcceptanceHistory:
    """The intervals of the latest half hour, by model. Owned by the event loop.

    Attributes:
        total: counters of all models since the start.
    """

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self.total = Interval(0)
        self._clock = clock
        self._by_model: defaultdict[str, deque[Interval]] = defaultdict(
            partial(deque, maxlen=NUM_INTERVALS)
        )

    def add(self, model: str, stats: SpeculationStats) -> None:
        """Counts a generation that has ended."""
        if not stats.num_verified_rounds:
            return
        number, intervals = int(self._clock()) // INTERVAL_S, self._by_model[model]
        if not intervals or intervals[-1].number < number:
            intervals.append(Interval(number))
        for interval in (intervals[-1], self.total):
            interval.num_verified_rounds += stats.num_verified_rounds
            interval.num_accepted += stats.num_accepted

    def intervals(self, model: str) -> list[Interval]:
        """Returns all `NUM_INTERVALS`, oldest first, empty ones included, so that the lists of
        several workers line up."""
        by_number = {interval.number: interval for interval in self._by_model.get(model, ())}
        last = int(self._clock()) // INTERVAL_S
        return [by_number.get(n) or Interval(n) for n in range(last - NUM_INTERVALS + 1, last + 1)]


class GatewayMetrics:
    """Owns the registry behind `/metrics`.

    Attributes:
        acceptance: acceptance lengths of the latest half hour.
        vllm: the same requests under vLLM's metric names.
        requests, tokens, first_token, duration, per_token: filled by `RequestRecord`.
    """

    def __init__(self, pool: TargetPool, quotas: Quotas | None = None) -> None:
        self.acceptance = AcceptanceHistory()
        self.registry = CollectorRegistry()
        self.vllm = VllmMetrics()
        self.registry.register(self.vllm)
        self.registry.register(_PoolCollector(pool))
        if quotas is not None:
            self.registry.register(ClientCollector(quotas))
        self.requests = Counter(
            "outrider_gateway_requests",
            "Generation requests by endpoint and how they ended: finished, failed, "
            "client_gone, client_too_slow, aborted",
            ("endpoint", "outcome"),
            registry=self.registry,
        )
        self.tokens = Counter(
            "outrider_gateway_tokens",
            "Tokens of ended requests by kind: prompt, cached_prompt, output, accepted_draft",
            ("kind",),
            registry=self.registry,
        )
        self.first_token = self._histogram(
            "time_to_first_token", "From the parsed request to its first token", _SECONDS
        )
        self.duration = self._histogram(
            "request_duration", "From the parsed request to its last token", _SECONDS
        )
        self.per_token = self._histogram(
            "time_per_output_token", "Of one request, averaged after its first step", _LATENCIES
        )

    def exposition(self) -> bytes:
        """Returns the text Prometheus scrapes."""
        return generate_latest(self.registry)

    def _histogram(self, name: str, meaning: str, buckets: Sequence[float]) -> Histogram:
        return Histogram(
            f"outrider_gateway_{name}_seconds", meaning, buckets=buckets, registry=self.registry
        )


def kv_usage_exposition(pool: TargetPool, statuses: Sequence[TargetStatus]) -> bytes:
    """Returns vLLM's KV cache usage over the targets that report it; empty if none does."""
    num_tokens = sum(status.num_max_tokens for status in statuses)
    if not num_tokens:
        return b""
    name, labels = "vllm:kv_cache_usage_perc", ("model_name", "engine")
    gauge = Gauge(name, "Share of KV tokens held, 1 is all", labels, registry=None)
    num_used = sum(status.num_used_tokens for status in statuses)
    gauge.labels(next(iter(pool.models()), ""), "0").set(num_used / num_tokens)
    return generate_latest(gauge)


class _PoolCollector(Collector):
    """Reads the pool at a scrape, so that steps need not update metrics."""

    def __init__(self, pool: TargetPool) -> None:
        self._pool = pool

    def collect(self) -> Iterator[Metric]:
        prefix, labels = "outrider_gateway_target", ("target",)
        families: tuple[_Family, ...] = (
            GaugeMetricFamily(
                f"{prefix}_serving", "1 while the target takes requests", labels=labels
            ),
            GaugeMetricFamily(
                f"{prefix}_requests", "Generations submitted and not ended", labels=labels
            ),
            CounterMetricFamily(
                f"{prefix}_tokens", "Tokens received from the target", labels=labels
            ),
        )
        for link in self._pool.links:
            values = link.state is TargetState.SERVING, link.num_live, link.num_tokens
            for family, value in zip(families, values, strict=True):
                family.add_metric((link.address,), float(value))
        yield from families
        yield GaugeMetricFamily(
            "outrider_gateway_requests_waiting",
            "Generations that lost their target and wait for another",
            value=self._pool.num_waiting,
        )


class ClientCollector(Collector):
    """Reads the quotas at a scrape. Labels are names of keys, so their number is bounded."""

    def __init__(self, quotas: Quotas) -> None:
        self._quotas = quotas

    def collect(self) -> Iterator[Metric]:
        prefix, labels = "outrider_gateway_client", ("client",)
        families: tuple[_Family, ...] = (
            CounterMetricFamily(
                f"{prefix}_requests", "POST and PUT requests let in", labels=labels
            ),
            CounterMetricFamily(f"{prefix}_tokens", "Prompt and output tokens", labels=labels),
            GaugeMetricFamily(f"{prefix}_open_requests", "Requests being answered", labels=labels),
        )
        refusals = CounterMetricFamily(
            f"{prefix}_refusals",
            "Requests above a limit of the key: requests, tokens, concurrency",
            labels=("client", "limit"),
        )
        for quota in self._quotas.all:
            values = quota.num_requests, quota.num_tokens, quota.num_open
            for family, value in zip(families, values, strict=True):
                family.add_metric((quota.name,), value)
            for limit, count in quota.refusals.items():
                refusals.add_metric((quota.name, limit), count)
        yield from (*families, refusals)


class RequestRecord:
    """Records one HTTP request from its plan to its end.

    Attributes:
        traceparent: parent of the target's span.
    """

    def __init__(self, endpoint: str, plan: Plan, metrics: GatewayMetrics, tracer: Tracer) -> None:
        self._endpoint = endpoint
        self._plan = plan
        self._metrics = metrics
        self._begin_s = time.perf_counter()
        name = plan.model.name
        self._figures = [metrics.vllm.begin(name, self._begin_s) for _ in plan.generations]
        self._has_tokens = False
        self._span = tracer.begin(
            f"gateway.{endpoint}",
            current_traceparent.get(),
            {
                "outrider.request_id": plan.generations[0].request_id,
                "gen_ai.request.model": name,
                "gen_ai.usage.input_tokens": plan.num_prompt_tokens,
            },
        )
        self.traceparent = self._span.traceparent

    def started(self, choice: Choice) -> float:
        """Called when a choice leaves the target's queue; returns that time."""
        now_s, figures = time.perf_counter(), self._figures[choice.index]
        self._metrics.vllm.start(figures, choice.num_cached_tokens, now_s)
        return now_s

    def tokens(self, choice: Choice, delta: Delta) -> None:
        """Called when tokens of a choice arrive."""
        if not self._has_tokens:
            self._has_tokens = True
            self._span.event("first_token")
        figures, now_s = self._figures[choice.index], time.perf_counter()
        num_drafted, num_accepted = delta.num_drafted, delta.num_accepted
        num_tokens = len(delta.token_ids)
        self._metrics.vllm.tokens(figures, num_tokens, now_s, num_drafted, num_accepted)

    def end(self, choices: Sequence[Choice], error: BaseException | None) -> int:
        """Called after the last byte or when the client is gone; returns the output token count."""
        plan, metrics, now_s = self._plan, self._metrics, time.perf_counter()
        # A failed stream raises another error, with the failure as its cause.
        kinds = type(error), type(getattr(error, "__cause__", None))
        outcome = next((_OUTCOMES[kind] for kind in kinds if kind in _OUTCOMES), "failed")
        outcome = "finished" if error is None else outcome
        counts = {
            "prompt": plan.num_prompt_tokens,
            "cached_prompt": sum(c.num_cached_tokens for c in choices[:: plan.num_choices]),
            "output": sum(choice.num_output_tokens for choice in choices),
            "accepted_draft": sum(choice.num_accepted for choice in choices),
        }
        metrics.requests.labels(self._endpoint, outcome).inc()
        for kind, count in counts.items():
            metrics.tokens.labels(kind).inc(count)
        for choice, figures in zip(choices, self._figures, strict=True):
            metrics.acceptance.add(plan.model.name, choice.stats)
            num_prompt = len(plan.generations[choice.index].prompt_token_ids)
            reason = "error" if outcome == "failed" else "abort"
            if choice.finish_reason is not None:
                reason = choice.finish_reason.value
            metrics.vllm.end(figures, num_prompt, reason)
        facts: dict[str, str | int | float] = {
            "endpoint": self._endpoint,
            "outcome": outcome,
            "num_prompt": counts["prompt"],
            "num_output": counts["output"],
            "num_accepted": counts["accepted_draft"],
            "duration_s": round(now_s - self._begin_s, 6),
        }
        firsts = [(figures.first_s, figures.num_first_tokens) for figures in self._figures]
        started = [(first_s, count) for first_s, count in firsts if first_s is not None]
        if started:
            first_s, num_first_tokens = min(started)
            facts["first_token_s"] = round(first_s - self._begin_s, 6)
            if outcome == "finished":
                metrics.first_token.observe(first_s - self._begin_s)
                metrics.duration.observe(now_s - self._begin_s)
                if (num_later := counts["output"] - num_first_tokens) > 0:
                    metrics.per_token.observe((now_s - first_s) * len(choices) / num_later)
        if (quota := current_quota.get()) is not None:
            facts["client"] = quota.name
        _log.info("request ended", extra=facts)
        attributes = {f"outrider.{name}": value for name, value in facts.items()}
        attributes["gen_ai.usage.output_tokens"] = counts["output"]
        self._span.end(attributes, None if outcome == "finished" else _reason(error, outcome))
        return counts["output"]


def _reason(error: BaseException | None, outcome: str) -> str:
    for failure in (error, getattr(error, "__cause__", None)):
        if isinstance(failure, OutriderError):
            return failure.reason
    return outcome
