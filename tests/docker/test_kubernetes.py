"""The Kubernetes manifests: that each overlay fits the base, itself and the services' flags."""

from __future__ import annotations

import functools
import inspect
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gateway.settings import GatewaySettings
from services.draft.engine import DraftEngine
from services.draft.settings import DraftSettings
from services.embedded_settings import embedded_settings
from services.target.settings import TargetSettings
from shared.settings import load_settings, split_arguments
from tests.helpers.kustomize import Manifest, built

FOLDER = Path(__file__).parents[2] / "docker" / "kubernetes"
SETTINGS = {"target": TargetSettings, "draft": DraftSettings, "gateway": GatewaySettings}
# A host of a target that is not the first runs the target, too.
SETTINGS_OF_PODS = SETTINGS | {"target-host": TargetSettings}
OVERLAYS = sorted(path.name for path in (FOLDER / "overlays").iterdir())


@functools.cache
def _manifests(overlay: str) -> tuple[Manifest, ...]:
    return tuple(built(FOLDER / "overlays" / overlay))


def _objects(kind: str, overlay: str = "demo") -> dict[str, Manifest]:
    return {each["metadata"]["name"]: each for each in _manifests(overlay) if each["kind"] == kind}


def _pods(overlay: str = "demo") -> dict[str, Any]:
    """Templates of pods by the service that they run."""
    pods = {
        name: each["spec"]["template"]
        for name, each in _objects("Deployment", overlay).items()
        if each["spec"].get("replicas") != 0
    }
    for group in _objects("LeaderWorkerSet", overlay).values():
        template = group["spec"]["leaderWorkerTemplate"]
        for each in (template["leaderTemplate"], template["workerTemplate"]):
            pods[each["metadata"]["labels"]["app.kubernetes.io/name"]] = each
    return pods


def _pod(name: str) -> dict[str, Any]:
    pod: dict[str, Any] = _pods()[name]
    return pod


PODS = [(overlay, name) for overlay in OVERLAYS for name in _pods(overlay)]


def test_there_is_an_overlay_for_each_way_to_serve() -> None:
    assert OVERLAYS == ["demo", "gpu", "gpus", "groups", "hosts"]
    assert set(_pods("gpu")) == {"target", "gateway"}
    assert set(_pods("hosts")) == {"target", "target-host", "gateway"}
    assert all(set(_pods(each)) == set(SETTINGS) for each in ("demo", "gpus", "groups"))


def _settings(overlay: str, name: str) -> Any:
    """Returns the settings of a pod; of those of a group, the second host's."""
    [container] = _pods(overlay)[name]["spec"]["containers"]
    number = "1" if name == "target-host" else "0"
    words = [
        word.replace("$(LWS_LEADER_ADDRESS)", "leader").replace("$(LWS_WORKER_INDEX)", number)
        for word in container["args"]
    ]
    own, others = split_arguments(SETTINGS_OF_PODS[name], words)
    service = name.partition("-")[0]
    env = {each["name"]: "a secret" for each in container.get("env", ()) if "valueFrom" in each}
    settings: Any = load_settings(SETTINGS_OF_PODS[name], service=service, arguments=own, env=env)
    if others:
        assert embedded_settings(settings, others, {}).algorithm.reads_features
    return settings


@pytest.mark.parametrize(("overlay", "name"), PODS)
def test_a_pod_is_served_with_flags_that_exist(overlay: str, name: str) -> None:
    [container] = _pods(overlay)[name]["spec"]["containers"]
    settings = _settings(overlay, name)
    if name == "target-host":
        assert "ports" not in container
        return
    ports = {port["containerPort"] for port in container["ports"]}
    assert settings.port in ports
    if name != "gateway":
        assert settings.metrics_port in ports
        annotations = _pods(overlay)[name]["metadata"].get("annotations", {})
        scraped = annotations.get("prometheus.io/port", str(settings.metrics_port))
        assert scraped == str(settings.metrics_port)


@pytest.mark.parametrize(("overlay", "name"), PODS)
def test_a_pod_keeps_the_restricted_standard(overlay: str, name: str) -> None:
    spec = _pods(overlay)[name]["spec"]
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
    assert container["image"] == f"registry.example/outrider-{name.partition('-')[0]}:0.1.0"


@pytest.mark.parametrize(("overlay", "name"), PODS)
def test_what_a_pod_mounts_is_there(overlay: str, name: str) -> None:
    spec = _pods(overlay)[name]["spec"]
    [container] = spec["containers"]
    volumes = {each["name"]: each for each in spec["volumes"]}
    assert {each["name"] for each in container["volumeMounts"]} == set(volumes)
    claims = {
        each["persistentVolumeClaim"]["claimName"]
        for each in volumes.values()
        if "persistentVolumeClaim" in each
    }
    assert claims <= set(_objects("PersistentVolumeClaim", overlay))
    assert bool(claims) == any(word.startswith("/models/") for word in container["args"])


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
    [maintenance] = [rule for rule in rules if {"port": 50052} in rule["ports"]]
    [operator] = maintenance["from"]
    assert operator["podSelector"]["matchLabels"]["app.kubernetes.io/name"] == "gateway"


def test_drafts_are_scaled_by_a_series_that_they_have() -> None:
    [autoscaler] = _objects("HorizontalPodAutoscaler", "gpus").values()
    reference = autoscaler["spec"]["scaleTargetRef"]
    assert reference["name"] in _objects(reference["kind"], "gpus")
    [metric] = autoscaler["spec"]["metrics"]
    figure = metric["pods"]["metric"]["name"].removeprefix("outrider_draft_")
    assert f'"{figure}":' in inspect.getsource(DraftEngine.gauges)
    assert "replicas" not in _objects("Deployment", "gpus")["draft"]["spec"]


@pytest.mark.parametrize("overlay", ["groups", "hosts"])
def test_the_gateway_names_every_group(overlay: str) -> None:
    [group] = _objects("LeaderWorkerSet", overlay).values()
    name, count = group["metadata"]["name"], group["spec"]["replicas"]
    args = _pods(overlay)["gateway"]["spec"]["containers"][0]["args"]
    settings = load_settings(GatewaySettings, service="gateway", arguments=args, env={})
    assert settings.target == tuple(f"{name}-{place}.{name}:50051" for place in range(count))
    labels = group["spec"]["leaderWorkerTemplate"]["leaderTemplate"]["metadata"]["labels"]
    policy = _objects("NetworkPolicy", overlay)["target"]["spec"]["podSelector"]["matchLabels"]
    assert policy.items() <= labels.items()


def test_the_hosts_of_a_target_fit_together() -> None:
    [group] = _objects("LeaderWorkerSet", "hosts").values()
    first, other = (_settings("hosts", name) for name in ("target", "target-host"))
    assert first == replace(other, node_rank=0)
    assert (first.node_rank, other.node_rank) == (0, 1)
    assert first.nnodes == group["spec"]["leaderWorkerTemplate"]["size"]
    assert first.dist_init_addr.startswith("leader:")
    assert first.dist_secret == "a secret"
    for name in ("target", "target-host"):
        pod = _pods("hosts")[name]
        [container] = pod["spec"]["containers"]
        assert container["resources"]["limits"]["nvidia.com/gpu"] == first.ranks.num_here
        # Time for requests that run, and to end behind the first host.
        assert pod["spec"]["terminationGracePeriodSeconds"] > first.drain_grace_s
    policy = _objects("NetworkPolicy", "hosts")["hosts"]["spec"]
    [rule] = policy["ingress"]
    [peer] = rule["from"]
    assert "ports" not in rule, "they take any"
    assert peer["podSelector"] == policy["podSelector"]
    [names] = policy["podSelector"]["matchExpressions"]
    labels = {_pods("hosts")[name]["metadata"]["labels"]["app.kubernetes.io/name"]
              for name in ("target", "target-host")}  # fmt: skip
    assert set(names["values"]) == labels


def test_a_patch_of_what_is_not_there_is_noticed(tmp_path: Path) -> None:
    (tmp_path / "kustomization.yaml").write_text(
        f"resources: [{FOLDER / 'base'}]\n"
        "patches: [{target: {kind: Deployment, name: nobody}, patch: '[]'}]\n"
    )
    with pytest.raises(AssertionError, match="nothing is"):
        built(tmp_path)
