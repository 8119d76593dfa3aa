"""The dashboard, the alerts and the scrape targets: they name what exists."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import yaml
from prometheus_client import CollectorRegistry

from gateway.metrics import GatewayMetrics
from gateway.pool import PoolSettings, TargetPool
from gateway.quota import Quotas
from services.draft.metrics import DraftMetrics
from services.draft.recorder import DraftCounters
from services.target.metrics import TargetMetrics
from shared.telemetry.vllm_metrics import EngineFigures, VllmMetrics

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "docker" / "observability"
_NAME = re.compile(r"\b(?:outrider_|vllm:)\w+")
_SUFFIXES = {"counter": ("_total",), "histogram": ("_bucket", "_sum", "_count"), "gauge": ("",)}


def _series() -> set[str]:
    """Returns every series that the three services can have."""
    target, draft = CollectorRegistry(), CollectorRegistry()
    TargetMetrics(target)
    target.register(VllmMetrics(lambda: EngineFigures("m", 0, 0, 0.0, 1, 1, 0)))
    draft.register(DraftMetrics(DraftCounters(), lambda: {"attached_target_count": 0.0}))
    gateway = GatewayMetrics(TargetPool(PoolSettings(("a:1",), "")), Quotas()).registry
    return {
        family.name + suffix
        for registry in (target, draft, gateway)
        for family in registry.collect()
        for suffix in _SUFFIXES[family.type]
    }


def _expressions() -> list[str]:
    dashboard = json.loads((FOLDER / "grafana" / "dashboards" / "outrider.json").read_text())
    panels = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    groups = yaml.safe_load((FOLDER / "alerts.yaml").read_text())["groups"]
    return panels + [rule["expr"] for group in groups for rule in group["rules"]]


def test_every_series_that_is_asked_for_exists() -> None:
    asked = {name for expression in _expressions() for name in _NAME.findall(expression)}
    assert len(asked) > 20
    assert asked - _series() == set()


def test_a_series_that_is_gone_is_noticed() -> None:
    assert "outrider_gateway_tokens_used" not in _series()


def test_panels_do_not_overlap_and_have_ids_of_their_own() -> None:
    dashboard = json.loads((FOLDER / "grafana" / "dashboards" / "outrider.json").read_text())
    places = [tuple(panel["gridPos"].values()) for panel in dashboard["panels"]]
    assert len(set(places)) == len(places)
    assert len({panel["id"] for panel in dashboard["panels"]}) == len(places)


def _compose(name: str) -> dict[str, Any]:
    compose: dict[str, Any] = yaml.safe_load((ROOT / name).read_text())
    return compose


def test_the_overlay_opens_the_ports_that_are_scraped() -> None:
    services = _compose("docker/compose.observability.yaml")["services"]
    jobs = yaml.safe_load((FOLDER / "prometheus.yaml").read_text())["scrape_configs"]
    ports = {job["job_name"]: str(job["dns_sd_configs"][0]["port"]) for job in jobs}
    assert ports["gateway"] == "8000"
    for name in ("target", "draft"):
        command = services[name]["command"]
        assert command[command.index("--metrics-port") + 1] == ports[name]


def test_the_files_that_overlays_mount_are_there() -> None:
    services = _compose("docker/compose.observability.yaml")["services"]
    mounts = [volume for service in services.values() for volume in service.get("volumes", ())]
    sources = [mount.split(":")[0] for mount in mounts if mount.startswith("./")]
    assert len(sources) == 5
    assert [source for source in sources if not (ROOT / source).exists()] == []


def test_every_service_is_confined() -> None:
    for name, service in _compose("compose.yaml")["services"].items():
        assert service["read_only"] is True, name
        assert service["cap_drop"] == ["ALL"], name
        assert {"mem_limit", "cpus", "pids_limit"} <= set(service), name
        base = service["build"]["args"]["BASE_IMAGE"]
        assert re.search(r":3\.11\.\d+-slim", base), name
        # Published ports are the loopback's, and only the gateway's.
        ports = service.get("ports", [])
        assert all(port.startswith("127.0.0.1:") for port in ports)
        assert bool(ports) == (name == "gateway")
