"""The gateway's metrics: every counter, gauge and histogram with its unit and meaning.

Names are without the `_total` that Prometheus adds to counters. Nothing here is touched per token:
requests are observed when they begin, at each step and when they end.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from gateway.acceptance_history import AcceptanceHistory
from gateway.choice import Choice
from gateway.client_metrics import ClientCollector
from gateway.generation import SpeculationStats, TargetState
from gateway.plan import Plan
from gateway.pool import TargetPool
from gateway.quota import Quotas
from shared.rpc.admin_client import TargetStatus
from shared.telemetry.vllm_metrics import VllmMetrics

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
_LATENCIES = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1)


class SpeculationTotals:
    """Speculation since the start, over the requests that ended.

    Attributes:
        num_verified_rounds, num_accepted: as in `SpeculationStats`.
    """

    def __init__(self) -> None:
        self.num_verified_rounds = 0
        self.num_accepted = 0

    @property
    def mean_accepted_length(self) -> float | None:
        """Tokens a verified round committed, bonus token included; None before the first."""
        if self.num_verified_rounds == 0:
            return None
        return 1 + self.num_accepted / self.num_verified_rounds

    def add(self, stats: SpeculationStats) -> None:
        self.num_verified_rounds += stats.num_verified_rounds
        self.num_accepted += stats.num_accepted


@dataclass(slots=True)
class RequestTimes:
    """Times of one HTTP request.

    Attributes:
        begin_s, first_token_s: of the monotonic clock.
        num_first_tokens: tokens of the first step.
    """

    begin_s: float
    first_token_s: float | None = None
    num_first_tokens: int = 0


class GatewayMetrics:
    """Owns the registry behind `/metrics`.

    Attributes:
        acceptance: over the latest requests.
        vllm: the same requests under the names that vLLM gives them.
    """

    def __init__(self, pool: TargetPool, quotas: Quotas | None = None) -> None:
        self.speculation = SpeculationTotals()
        self.acceptance = AcceptanceHistory()
        self.registry = CollectorRegistry()
        self.vllm = VllmMetrics()
        self.registry.register(self.vllm)
        self.registry.register(_PoolCollector(pool))
        if quotas is not None:
            self.registry.register(ClientCollector(quotas))
        self._requests = Counter(
            "outrider_gateway_requests",
            "Generation requests by endpoint and how they ended: finished, failed, "
            "client_gone, client_too_slow, aborted",
            ("endpoint", "outcome"),
            registry=self.registry,
        )
        self._tokens = Counter(
            "outrider_gateway_tokens",
            "Tokens of ended requests by kind: prompt, cached_prompt, output, accepted_draft",
            ("kind",),
            registry=self.registry,
        )
        self._first_token = self._histogram(
            "time_to_first_token", "From the parsed request to its first token", _SECONDS
        )
        self._duration = self._histogram(
            "request_duration", "From the parsed request to its last token", _SECONDS
        )
        self._per_token = self._histogram(
            "time_per_output_token", "Of one request, averaged after its first step", _LATENCIES
        )

    def exposition(self) -> bytes:
        """Returns the text Prometheus scrapes."""
        return generate_latest(self.registry)

    def end(
        self,
        endpoint: str,
        times: RequestTimes,
        plan: Plan,
        choices: Sequence[Choice],
        outcome: str,
    ) -> None:
        """Counts a request that ended."""
        self._requests.labels(endpoint, outcome).inc()
        num_output = sum(choice.num_output_tokens for choice in choices)
        self._tokens.labels("prompt").inc(plan.num_prompt_tokens)
        self._tokens.labels("cached_prompt").inc(sum(c.num_cached_tokens for c in choices))
        self._tokens.labels("output").inc(num_output)
        self._tokens.labels("accepted_draft").inc(sum(c.num_accepted for c in choices))
        for choice in choices:
            self.speculation.add(choice.stats)
            self.acceptance.add(plan.model, choice.stats)
        if outcome != "finished" or times.first_token_s is None:
            return
        now = time.perf_counter()
        self._first_token.observe(times.first_token_s - times.begin_s)
        self._duration.observe(now - times.begin_s)
        num_later = num_output - times.num_first_tokens
        if num_later > 0:
            self._per_token.observe((now - times.first_token_s) * len(choices) / num_later)

    def _histogram(self, name: str, meaning: str, buckets: Sequence[float]) -> Histogram:
        return Histogram(
            f"outrider_gateway_{name}_seconds", meaning, buckets=buckets, registry=self.registry
        )


def kv_usage_exposition(pool: TargetPool, statuses: Sequence[TargetStatus]) -> bytes:
    """Returns vLLM's share of KV tokens held, over the targets that tell; empty if none does."""
    num_tokens = sum(status.num_max_tokens for status in statuses)
    if not num_tokens:
        return b""
    name, labels = "vllm:kv_cache_usage_perc", ("model_name", "engine")
    gauge = Gauge(name, "Share of KV tokens held, 1 is all", labels, registry=None)
    num_used = sum(status.num_used_tokens for status in statuses)
    gauge.labels(next(iter(pool.models()), ""), "0").set(num_used / num_tokens)
    return generate_latest(gauge)


class _PoolCollector(Collector):
    """Reads the pool when it is scraped, so that steps need not report."""

    def __init__(self, pool: TargetPool) -> None:
        self._pool = pool

    def collect(self) -> Iterator[Metric]:
        prefix = "outrider_gateway_target"
        serving = GaugeMetricFamily(
            f"{prefix}_serving", "1 while the target takes requests", labels=("target",)
        )
        live = GaugeMetricFamily(
            f"{prefix}_requests", "Generations submitted and not ended", labels=("target",)
        )
        tokens = CounterMetricFamily(
            f"{prefix}_tokens", "Tokens received from the target", labels=("target",)
        )
        for link in self._pool.links:
            serving.add_metric((link.address,), float(link.state is TargetState.SERVING))
            live.add_metric((link.address,), link.num_live)
            tokens.add_metric((link.address,), link.num_tokens)
        waiting = GaugeMetricFamily(
            "outrider_gateway_requests_waiting",
            "Generations that lost their target and wait for another",
            value=self._pool.num_waiting,
        )
        yield from (serving, live, tokens, waiting)
