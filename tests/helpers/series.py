"""The names of all time series that the three services export."""

from __future__ import annotations

from prometheus_client import CollectorRegistry

from gateway.api_keys import Quotas
from gateway.metrics import GatewayMetrics
from gateway.pool import TargetPool
from gateway.settings import GatewaySettings
from services.draft.metrics import DraftCounters, DraftMetrics
from services.target.metrics import TargetMetrics, WantedMetrics
from shared.telemetry.vllm_metrics import EngineFigures, VllmMetrics
from shared.telemetry.wire_meter import WireMeter, WireMetrics

_SUFFIXES = {"counter": ("_total",), "histogram": ("_bucket", "_sum", "_count"), "gauge": ("",)}


def every_series() -> set[str]:
    """Returns the names as in a scrape, without labels."""
    target, draft = CollectorRegistry(), CollectorRegistry()
    TargetMetrics(target)
    target.register(WantedMetrics(tuple))
    target.register(VllmMetrics(lambda: EngineFigures("m", 0, 0, 0.0, 1, 1, 0)))
    draft.register(DraftMetrics(DraftCounters(), lambda: {"attached_target_count": 0.0}))
    for registry, prefix in ((target, "outrider_target"), (draft, "outrider_draft")):
        registry.register(WireMetrics(prefix, WireMeter()))
    gateway = GatewayMetrics(TargetPool(GatewaySettings(target=("a:1",)), ""), Quotas()).registry
    return {
        family.name + suffix
        for registry in (target, draft, gateway)
        for family in registry.collect()
        for suffix in _SUFFIXES[family.type]
    }
