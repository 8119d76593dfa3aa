"""The wheels: what is in them, and that they serve where there is no checkout."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import zipfile
from email.parser import Parser
from pathlib import Path

import httpx
import pytest

from tests.helpers.built_wheels import build_wheels, pip
from tests.helpers.serving import free_ports


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return build_wheels(tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheels"))


@pytest.fixture(scope="module")
def site(wheels: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with both wheels installed; what they depend on comes from this environment."""
    folder = tmp_path_factory.mktemp("site")
    pip("install", "--target", str(folder), *map(str, wheels.values()), at=folder)
    return folder


def _outrider(site: Path, folder: Path, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, str(site / "bin" / "outrider"), *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(site)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_weights_are_in_a_wheel_of_their_own(wheels: dict[str, Path]) -> None:
    code = zipfile.ZipFile(wheels["outrider"]).namelist()
    weights = zipfile.ZipFile(wheels["outrider_demo"]).namelist()
    assert not [name for name in code if name.endswith((".safetensors", ".bin", ".pt"))]
    assert sum(name.endswith(".safetensors") for name in weights) == 7
    assert not set(code) & set(weights)
    pages = {"gateway/playground/page/index.html", "gateway/openapi.html.jinja"}
    assert {*pages, "shared/demo/target/tokenizer.json"} <= set(code)


def test_the_demos_mixture_can_be_served(site: Path) -> None:
    folder = site / "shared" / "demo" / "demo-moe"
    names = {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}
    assert names <= {path.name for path in folder.iterdir()}
    process = _outrider(site, folder, "check", "--model", "demo-moe", "--algorithm", "MTP")
    output, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors
    assert "draft: MTP, demo-moe, 2.01 MiB on disk" in output


def test_the_gateway_needs_no_torch(wheels: dict[str, Path]) -> None:
    [name] = [n for n in zipfile.ZipFile(wheels["outrider"]).namelist() if n.endswith("/METADATA")]
    metadata = Parser().parsestr(zipfile.ZipFile(wheels["outrider"]).read(name).decode())
    needed = metadata.get_all("Requires-Dist") or []
    gateway = [each for each in needed if "extra" not in each or 'extra == "gateway"' in each]
    assert any(each.startswith("fastapi") for each in gateway)
    assert not [each for each in gateway if each.startswith(("torch", "transformers", "outrider"))]


def test_an_installed_package_serves(site: Path, tmp_path: Path) -> None:
    ports = free_ports(2)
    port, target, draft = next(ports), next(ports), next(ports)
    process = _outrider(
        *(site, tmp_path, "serve", "--port", str(port), "--target-port", str(target)),
        *("--draft-port", str(draft), "--log-dir", str(tmp_path / "logs")),
    )
    assert process.stdout is not None
    ready = process.stdout.readline()
    try:
        assert ready.startswith("ready: "), process.communicate()[1]
        body = {"model": "demo", "prompt": "The", "max_tokens": 4}
        url = f"http://127.0.0.1:{port}/v1/completions"
        assert httpx.post(url, json=body, timeout=60).json()["choices"]
    finally:
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 0
    expected = ("waiting for", "serve: stopping; at most")
    assert not [line for line in errors.splitlines() if not any(map(line.count, expected))]


def test_measurements_are_for_a_checkout(site: Path, tmp_path: Path) -> None:
    process = _outrider(site, tmp_path, "bench")
    assert "run it in a checkout" in process.communicate()[1]
    assert process.returncode == 2


def test_without_the_demos_weights_a_model_has_to_be_named(
    wheels: dict[str, Path], tmp_path: Path
) -> None:
    zipfile.ZipFile(wheels["outrider"]).extractall(tmp_path)
    served = subprocess.run(
        [sys.executable, "-m", "services.cli", "serve"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert "outrider-demo, which is not installed" in served.stderr
    assert served.returncode == 2
