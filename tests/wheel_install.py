"""`make test-wheel`: installs the wheels with pip into empty environments, as a user does.

The first gets `outrider[gateway]`, which must bring neither weights nor torch. The second gets
target, draft and demo as well; its `outrider serve` must answer a chat. Packages come from pip's
index, in the versions of `constraints.txt`.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import httpx

from tests.helpers.built_wheels import ROOT, build_wheels
from tests.helpers.serving import free_ports

_CHAT = {
    "model": "demo",
    "max_tokens": 16,
    "messages": [{"role": "user", "content": "What is the capital of France?"}],
}


def _environment(folder: Path, *wheels: str) -> Path:
    """Returns the `bin` of a new environment with the wheels and what they require."""
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    pip = [folder / "bin" / "python", "-m", "pip", "install", "--quiet"]
    pip += ["--disable-pip-version-check", "--constraint", ROOT / "constraints.txt"]
    begin_s = time.monotonic()
    subprocess.run([*pip, *wheels], check=True)
    size_mb = sum(path.lstat().st_size for path in folder.rglob("*")) / 1e6
    print(f"{folder.name}: {size_mb:,.0f} MB after {time.monotonic() - begin_s:.0f} s", flush=True)
    return folder / "bin"


def _check_gateway(binaries: Path, at: Path) -> None:
    """Torch and weights are absent; the gateway's command is there and runs."""
    site = next(binaries.parent.glob("lib/python*/site-packages"))
    assert not (site / "torch").exists()
    assert not list(site.rglob("*.safetensors"))
    for words in (["--version"], ["gateway", "--help"]):
        subprocess.run([binaries / "outrider", *words], cwd=at, check=True, capture_output=True)
    target = [binaries / "outrider", "target"]
    refused = subprocess.run(target, cwd=at, check=False, capture_output=True, text=True)
    assert refused.returncode != 0
    print(f"gateway: no torch, no weights; `outrider target` says: {refused.stderr.strip()}")


def _check_serving(binaries: Path, at: Path) -> None:
    """`outrider serve` says that it is ready, answers a chat and ends on SIGTERM."""
    ports = free_ports(2)
    port, target, draft = next(ports), next(ports), next(ports)
    flags = ["--port", port, "--target-port", target, "--draft-port", draft]
    path = f"{binaries}:{os.environ['PATH']}"
    with subprocess.Popen(
        ["outrider", "serve", *map(str, flags)],
        cwd=at,
        env={**os.environ, "PATH": path},
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        print(process.stdout.readline(), end="")
        url = f"http://127.0.0.1:{port}/v1/chat/completions"
        answer = httpx.post(url, json=_CHAT, timeout=60).raise_for_status().json()
        print(answer["choices"][0]["message"]["content"])
        print(answer["metrics"]["speculative_decoding"])
        process.terminate()
    assert process.returncode == 0


def main() -> None:
    """Builds the wheels, installs and tries them; keeps nothing."""
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        empty, source = folder / "empty", folder / "source"
        empty.mkdir()
        source.mkdir()
        wheels = build_wheels(source, folder / "wheels")
        code, demo = f"{wheels['outrider']}", str(wheels["outrider_demo"])
        _check_gateway(_environment(folder / "gateway", f"{code}[gateway]"), empty)
        _check_serving(_environment(folder / "whole", f"{code}[gateway,engine]", demo), empty)


if __name__ == "__main__":
    main()
