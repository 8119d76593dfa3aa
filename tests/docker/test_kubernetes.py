"""The Kubernetes manifests: that they fit each other and the services' flags."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from gateway.settings import GatewaySettings
from services.draft.settings import DraftSettings
from services.target.settings import TargetSettings
from shared.settings import load_settings

FOLDER = Path(__file__).parents[2] / "docker" / "kubernetes"
SETTINGS = {"target": TargetSettings, "draft": DraftSettings, "gateway": GatewaySettings}


def _objects(kind: str) -> dict[str, dict[str, Any]]:
    documents = yaml.safe_load_all((FOLDER / "outrider.yaml").read_text())
    return {each["metadata"]["name"]: each for each in documents if each and each["kind"] == kind}


def _pod(name: str) -> dict[str, Any]:
    pod: dict[str, Any] = _objects("Deployment")[name]["spec"]["template"]
    return pod


@pytest.mark.parametrize("name", list(SETTINGS))
def test_a_deployment_is_served_with_flags_that_exist(name: str) -> None:
    [container] = _pod(name)["spec"]["containers"]
    settings: Any = load_settings(SETTINGS[name], service=name, arguments=container["args"], env={})
    ports = {port["containerPort"] for port in container["ports"]}
    assert settings.port in ports
    if name != "gateway":
        assert settings.metrics_port in ports
        assert _pod(name)["metadata"]["annotations"]["prometheus.io/port"] == str(
            settings.metrics_port
        )


@pytest.mark.parametrize("name", list(SETTINGS))
def test_a_pod_keeps_the_restricted_standard(name: str) -> None:
    spec = _pod(name)["spec"]
    [container] = spec["containers"]
    assert spec["securityContext"]["runAsNonRoot"] is True
    assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert spec["automountServiceAccountToken"] is False
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert "memory" in container["resources"]["limits"]


def test_selectors_find_their_pods() -> None:
    services = _objects("Service") | {f"{n} budget": b for n, b in
                                      _objects("PodDisruptionBudget").items()}  # fmt: skip
    for name, each in services.items():
        selector = each["spec"]["selector"]
        selector = selector.get("matchLabels", selector)
        labels = _pod(name.split()[0])["metadata"]["labels"]
        assert selector.items() <= labels.items()
    for name, deployment in _objects("Deployment").items():
        assert deployment["spec"]["selector"]["matchLabels"] == _pod(name)["metadata"]["labels"]


def test_only_gateway_and_draft_reach_a_target() -> None:
    rules = _objects("NetworkPolicy")["target"]["spec"]["ingress"]
    [serving] = [rule for rule in rules if {"port": 50051} in rule["ports"]]
    peers = [peer["podSelector"]["matchLabels"] for peer in serving["from"]]
    assert sorted(peer["app.kubernetes.io/name"] for peer in peers) == ["draft", "gateway"]
    assert all({"port": 50052} not in rule["ports"] for rule in rules), "maintenance is for nobody"


def test_every_image_is_placed() -> None:
    kustomization = yaml.safe_load((FOLDER / "kustomization.yaml").read_text())
    placed = {image["name"] for image in kustomization["images"]}
    assert placed == {
        _pod(name)["spec"]["containers"][0]["image"] for name in _objects("Deployment")
    }
    assert all((FOLDER / name).is_file() for name in kustomization["resources"])
