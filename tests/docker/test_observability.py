"""The dashboard, the alerts and the scrape targets: they name what exists."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import yaml

from tests.helpers.series import every_series

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "docker" / "observability"
_NAME = re.compile(r"\b(?:outrider_|vllm:)\w+")


def _expressions() -> list[str]:
    dashboard = json.loads((FOLDER / "grafana" / "dashboards" / "outrider.json").read_text())
    panels = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    groups = yaml.safe_load((FOLDER / "alerts.yaml").read_text())["groups"]
    return panels + [rule["expr"] for group in groups for rule in group["rules"]]


def test_every_series_that_is_asked_for_exists() -> None:
    asked = {name for expression in _expressions() for name in _NAME.findall(expression)}
    assert len(asked) > 20
    assert asked - every_series() == set()


def test_a_series_that_is_gone_is_noticed() -> None:
    assert "outrider_gateway_tokens_used" not in every_series()


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
