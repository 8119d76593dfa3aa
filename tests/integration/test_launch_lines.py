"""Launch lines of SGLang's documents, unchanged, started with tiny models of the same names: one as
`outrider serve` does, and all in this process, where imports cost nothing."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from huggingface_hub import constants

from services.target.engine_factory import build_engine
from services.target.process import TargetProcess
from shared.model_files import tokenizer_sha256
from shared.rpc.channel import open_channel
from shared.tls import CertFolder
from tests.helpers.served import PROMPTS, Target, running_draft
from tests.helpers.serving import ROOT, serving
from tests.helpers.stand_ins import write_stand_ins
from tests.services.test_launch_lines import LINES, plan_of

ON_FREE_PORTS: dict[str, Any] = {"host": "127.0.0.1", "port": 0, "maintenance_port": 0}

NUM_TOKENS = 16
SERVED = next(line for line in LINES if "freq_32768.pt --mem-fraction-static" in line)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `<your-model>` and its draft."""
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory, models: Path) -> dict[str, str]:
    cache = tmp_path_factory.mktemp("cache")
    write_stand_ins(cache, models)
    return {"HF_HUB_CACHE": str(cache), "HF_HUB_OFFLINE": "1"}


def test_a_line_starts_and_answers_over_tls_on_every_hop(
    hub: dict[str, str], certs: CertFolder, tmp_path: Path
) -> None:
    """The ready line alone says that draft, gateway and probes reached the target over TLS."""
    before, _, flags = SERVED.partition("python3 -m sglang.launch_server ")
    env = {**hub, **dict(word.split("=") for word in before.split())}
    words = [*shlex.split(flags), "--certs", str(certs.path)]
    with serving(tmp_path, *words, env=env) as (process, ready, plain_url):
        base_url = plain_url.replace("http:", "https:")
        assert ready.startswith(f"ready: {base_url}/v1"), process.communicate()
        assert "speculation: EAGLE (remote)" in ready
        context = certs.client_tls().context()
        with httpx.Client(base_url=base_url, verify=context, timeout=60) as client:
            [model] = client.get("/v1/models").json()["data"]
            body = {"model": model["id"], "prompt": "ab", "max_tokens": 4, "ignore_eos": True}
            answer = client.post("/v1/completions", json=body).json()
        with pytest.raises(httpx.TransportError):
            httpx.get(f"{plain_url}/v1/models")
    assert model["id"] in SERVED
    assert answer["usage"]["completion_tokens"] == 4


@pytest.mark.parametrize("number", range(len(LINES)))
async def test_every_line_starts_a_target_and_its_draft(
    number: int, hub: dict[str, str], models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The draft's trees are verified, and the tokens are those of plain decoding."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", hub["HF_HUB_CACHE"])
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.chdir(models)
    plan = plan_of(LINES[number])
    [draft] = plan.drafts
    settings = replace(
        plan.target,
        **ON_FREE_PORTS,
        candidate_wait_ms=10_000.0,
        candidate_wait_sequences=99,
        speculative_adaptive=False,
    )
    process = TargetProcess(
        build_engine(settings, lambda report: None),
        settings,
        tokenizer_sha256(settings.tokenizer_path or settings.model_path),
    )
    await process.start()
    try:
        async with (
            open_channel(f"127.0.0.1:{process.port}") as channel,
            open_channel(f"127.0.0.1:{process.admin_port}") as admin,
        ):
            target = Target(process, channel, admin)
            expected, _ = await target.generate(PROMPTS[0], 0.0, num_tokens=NUM_TOKENS)
            own = replace(draft.settings, target=(target.address,), **ON_FREE_PORTS)
            async with running_draft(own):
                await target.until_attached(1)
                tokens, stats = await target.generate(PROMPTS[0], 0.0, num_tokens=NUM_TOKENS)
        assert tokens == expected
        # Nothing repeats that an n-gram could foresee.
        assert stats.verified_round_count > 0 or draft.algorithm == "NGRAM"
    finally:
        await process.stop(grace_s=0.0)


def test_a_model_that_cannot_be_had_is_one_line(hub: dict[str, str]) -> None:
    command = [sys.executable, "-m", "services.cli", "serve", "--model", "owner/absent"]
    result = subprocess.run(
        command, cwd=ROOT, env={**os.environ, **hub}, capture_output=True, text=True, check=False
    )
    assert result.returncode == 2
    [line] = result.stderr.splitlines()
    assert line.startswith("outrider serve: --model-path is owner/absent: there is no such path")
    assert "`hf download owner/absent`" in line
