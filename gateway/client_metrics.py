"""Usage by client, read from the quotas at each scrape."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from gateway.quota import Quotas


class ClientCollector(Collector):
    """Clients are the names of keys, so their number is bounded."""

    def __init__(self, quotas: Quotas) -> None:
        self._quotas = quotas

    def collect(self) -> Iterator[Metric]:
        prefix = "outrider_gateway_client"
        labels = ("client",)
        requests = CounterMetricFamily(f"{prefix}_requests", "POST requests let in", labels=labels)
        tokens = CounterMetricFamily(f"{prefix}_tokens", "Prompt and output tokens", labels=labels)
        is_open = GaugeMetricFamily(
            f"{prefix}_open_requests", "Requests being answered", labels=labels
        )
        refusals = CounterMetricFamily(
            f"{prefix}_refusals",
            "Requests above a limit of the key: requests, tokens, concurrency",
            labels=("client", "limit"),
        )
        for quota in self._quotas.all:
            requests.add_metric((quota.name,), quota.num_requests)
            tokens.add_metric((quota.name,), quota.num_tokens)
            is_open.add_metric((quota.name,), quota.num_open)
            for limit, count in quota.refusals.items():
                refusals.add_metric((quota.name, limit), count)
        yield from (requests, tokens, is_open, refusals)
