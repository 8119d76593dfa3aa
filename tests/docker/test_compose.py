"""compose.yaml: the demo, or a model of one's own by a variable."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from gateway.settings import GatewaySettings
from services.draft.settings import DraftSettings
from services.target.settings import DEMO_MODEL, TargetSettings
from shared.settings import load_settings

ROOT = Path(__file__).parents[2]
OVERLAYS = sorted((ROOT / "docker").glob("compose.*.yaml"))
SETTINGS: dict[str, Any] = {
    "target": TargetSettings,
    "draft": DraftSettings,
    "gateway": GatewaySettings,
}
# The innermost first: `${A:-text}` and `${A:+text}`, whose text holds no further variable.
_VARIABLE = re.compile(r"\$\{(\w+)(?::([-+])([^${}]*))?\}")


def _filled(text: str, env: Mapping[str, str]) -> str:
    def value(match: re.Match[str]) -> str:
        name, operator, other = match.groups()
        given = env.get(name, "")
        if operator == "+":
            return other if given else ""
        return given or other or ""

    while (filled := _VARIABLE.sub(value, text)) != text:
        text = filled
    return text


def _services(**env: str) -> dict[str, Any]:
    content = yaml.safe_load(_filled((ROOT / "compose.yaml").read_text(), env))
    services: dict[str, Any] = content["services"]
    return services


def _settings(name: str, **env: str) -> Any:
    service = _services(**env)[name]
    return load_settings(
        SETTINGS[name], service=name, arguments=service["command"], env=service["environment"]
    )


def test_without_variables_the_demo_is_served() -> None:
    target, draft = _settings("target"), _settings("draft")
    assert (target.model_path, target.model_id) == (DEMO_MODEL, "demo")
    assert (draft.algorithm.value, draft.speculative_draft_model_path) == ("STANDALONE", None)
    assert _settings("gateway").tokenizer == DEMO_MODEL


def test_one_variable_serves_a_model_of_ones_own() -> None:
    model = "/models/llama"
    services = _services(MODEL=model)
    assert all(f"{model}:/model:ro" in services[name]["volumes"] for name in SETTINGS)
    target = _settings("target", MODEL=model)
    assert (target.model_path, target.model_id) == (Path("/model"), model)
    assert _settings("draft", MODEL=model).algorithm.value == "NGRAM"
    assert _settings("gateway", MODEL=model).tokenizer == Path("/model")


@pytest.mark.parametrize(("algorithm", "head"), [("STANDALONE", ""), ("EAGLE3", "yes")])
def test_a_draft_model_is_mounted_beside_it(algorithm: str, head: str) -> None:
    env = {"MODEL": "/m", "DRAFT_MODEL": "/d", "ALGORITHM": algorithm, "HEAD": head}
    assert "/d:/draft:ro" in _services(**env)["draft"]["volumes"]
    draft = _settings("draft", **env)
    assert draft.algorithm.value == algorithm
    assert draft.speculative_draft_model_path == Path("/draft")
    assert draft.target_model_path == (Path("/model") if head else None)


@pytest.mark.parametrize("path", OVERLAYS, ids=lambda path: path.name)
def test_the_commands_of_an_overlay_have_flags_that_exist(path: Path) -> None:
    services = yaml.safe_load(_filled(path.read_text(), {}))["services"]
    for name in SETTINGS:
        words = services.get(name, {}).get("command", ())
        load_settings(SETTINGS[name], service=name, arguments=words, env={})


@pytest.mark.parametrize("name", ["target", "draft"])
def test_compiled_kernels_are_kept_on_a_volume_that_any_user_may_write(name: str) -> None:
    overlay = yaml.safe_load((ROOT / "docker" / "compose.gpu.yaml").read_text())
    service = overlay["services"][name]
    [(source, folder)] = [volume.split(":") for volume in service["volumes"]]
    assert source in overlay["volumes"]
    assert service["environment"]["TRITON_CACHE_DIR"] == folder
    # A new volume has the mode of the image's folder.
    dockerfile = (ROOT / "docker" / f"{name}.Dockerfile").read_text()
    assert f"install --directory --mode 1777 {folder}\n" in dockerfile
