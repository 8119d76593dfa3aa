"""Launch lines of SGLang's documents, started for real with tiny models of the same names."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from tests.helpers.serving import ROOT, serving
from tests.helpers.stand_ins import write_stand_ins

_LINES = (ROOT / "tests" / "services" / "launch_lines.txt").read_text().splitlines()
STARTED = {
    "EAGLE3": "--speculative-algorithm EAGLE3 ",
    "EAGLE (MTP)": "--model-path XiaomiMiMo/MiMo-7B-RL",
    "EAGLE": "freq_32768.pt --mem-fraction-static",
}


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    cache = tmp_path_factory.mktemp("cache")
    write_stand_ins(cache, tmp_path_factory.mktemp("models"))
    return {"HF_HUB_CACHE": str(cache), "HF_HUB_OFFLINE": "1"}


@pytest.mark.parametrize("algorithm", STARTED)
def test_a_line_starts_and_answers(algorithm: str, hub: dict[str, str], tmp_path: Path) -> None:
    [line, *_] = [each for each in _LINES if STARTED[algorithm] in each]
    before, _, flags = line.partition("python3 -m sglang.launch_server ")
    env = {**hub, **dict(word.split("=") for word in before.split())}
    with serving(tmp_path, *shlex.split(flags), env=env) as (process, ready, base_url):
        assert f"speculation: {algorithm} (remote)" in ready, process.communicate()
        [model] = httpx.get(f"{base_url}/v1/models").json()["data"]
        body = {"model": model["id"], "prompt": "ab", "max_tokens": 4, "ignore_eos": True}
        answer = httpx.post(f"{base_url}/v1/completions", json=body, timeout=60).json()
    assert model["id"] in line
    assert answer["usage"]["completion_tokens"] == 4


def test_a_model_that_cannot_be_had_is_one_line(hub: dict[str, str]) -> None:
    command = [sys.executable, "-m", "services.cli", "serve", "--model", "owner/absent"]
    result = subprocess.run(
        command, cwd=ROOT, env={**os.environ, **hub}, capture_output=True, text=True, check=False
    )
    assert result.returncode == 2
    [line] = result.stderr.splitlines()
    assert line.startswith("outrider serve: --model-path is owner/absent: there is no such path")
    assert "`hf download owner/absent`" in line
