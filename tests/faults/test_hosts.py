"""Hosts that misbehave: full disks, clocks that jump."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import sys
import time
from pathlib import Path

import httpx
import pytest

from tests.gateway.driving import CHAT, MakeGateway, http_client
from tests.gateway.test_process import ROOT, free_port, is_ready
from tests.helpers.fake_target import FakeTarget

FULL = Path("/dev/full")
SHORT = {**CHAT, "max_tokens": 6, "ignore_eos": True}
# Who may ask for the time of day, and what for: nobody waits or measures by it.
WALL_CLOCK = {
    "gateway/planner.py": "`created` of an answer",
    "gateway/process.py": "start times, shown",
    "gateway/responses/answer.py": "`created_at` of an answer",
    "gateway/responses/routes.py": "`created_at` of an answer and of a conversation",
    "gateway/model_text.py": "`strftime_now` of templates",
    "services/certs.py": "validity of certificates",
    "services/draft/learner/learner.py": "time of a lesson, recorded",
    "services/draft/process.py": "start time, shown",
    "services/embedded.py": "attach time, shown",
    "services/target/admin_service.py": "start time, shown",
    "services/target/drafts/speculation_service.py": "attach time, shown",
    "services/target/requests/generate_service.py": "times of updates of the weights, shown",
    "services/target/vllm/vllm_engine_service.py": "times of the last request and report, shown",
}


@pytest.mark.skipif(not FULL.exists(), reason="a device that is always full")
async def test_logs_on_a_full_disk_cost_logs_only(target: FakeTarget, model_folder: Path) -> None:
    port = free_port()
    with FULL.open("wb") as full:  # noqa: ASYNC230 - a device
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            *("-m", "gateway", "--port", str(port), "--maintenance-port", "0"),
            *("--target", target.address, "--tokenizer", str(model_folder)),
            *("--log-level", "debug"),
            cwd=ROOT,
            stdout=full,
            stderr=full,
            env=os.environ,
        )
    try:
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=60.0) as client:
            while not await is_ready(client, str(client.base_url)):
                assert process.returncode is None, "it ended over its logs"
                await asyncio.sleep(0.05)
            for _ in range(3):
                assert (await client.post("/v1/chat/completions", json=SHORT)).status_code == 200
    finally:
        process.send_signal(signal.SIGTERM)
        # 120: Python could not flush what it had to say on its way out.
        assert await asyncio.wait_for(process.wait(), 60.0) in (0, 120)


async def test_a_clock_that_jumps_changes_no_answer_and_no_wait(
    make_gateway: MakeGateway, target: FakeTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    gateway = await make_gateway(target)
    async with http_client(gateway) as client:
        before = (await client.post("/v1/chat/completions", json=SHORT)).json()
        for jump_s in (-86_400.0, 86_400.0):
            now_s = time.time() + jump_s
            with monkeypatch.context() as patch:
                patch.setattr(time, "time", lambda now_s=now_s: now_s)
                answer = await client.post("/v1/chat/completions", json=SHORT)
            assert answer.status_code == 200
            assert answer.json()["choices"] == before["choices"]
            assert answer.json()["created"] == int(now_s)


def test_nobody_waits_or_measures_by_the_time_of_day() -> None:
    asks = re.compile(r"\btime\.time(?:_ns)?\(|datetime\.now\(|\butcnow\(")
    found = {
        str(path.relative_to(ROOT))
        for package in ("gateway", "services", "shared")
        for path in (ROOT / package).rglob("*.py")
        if asks.search(path.read_text())
    }
    ours = {name for name in found if "training" not in name and "recipe" not in name}
    assert ours - set(WALL_CLOCK) == set(), "use time.monotonic"
