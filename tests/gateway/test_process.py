"""The process as `make serve` starts it, and the demo against it."""

from __future__ import annotations

import asyncio
import io
import json
import os
import re
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
import pytest_asyncio

from gateway.settings import GatewaySettings
from services import demo
from shared.errors import SettingsError
from shared.settings import load_settings, shown_settings
from shared.text import Tokenizer
from tests.gateway.driving import CHAT, events, say
from tests.helpers.fake_target import FakeTarget
from tests.helpers.serving import free_ports

ROOT = Path(__file__).parents[2]


def free_port() -> int:
    return next(free_ports(2))


@pytest_asyncio.fixture
async def process(
    request: pytest.FixtureRequest, target: FakeTarget, model_folder: Path
) -> AsyncIterator[tuple[asyncio.subprocess.Process, str]]:
    """A gateway process in front of the target, and its URL. Parameters are further flags."""
    port = free_port()
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-m", "gateway", "--port", str(port), "--maintenance-port", "0"),
        *("--target", target.address, "--tokenizer", str(model_folder)),
        *getattr(request, "param", ()),
        cwd=ROOT,
        stderr=asyncio.subprocess.PIPE,
        env={**os.environ, "OUTRIDER_GATEWAY_LOG_LEVEL": "error"},
    )
    url = f"http://127.0.0.1:{port}"
    async with httpx.AsyncClient(timeout=60.0) as client:
        while not await is_ready(client, url):
            assert process.returncode is None, await process.communicate()
            await asyncio.sleep(0.05)
    yield process, url
    if process.returncode is None:
        process.kill()
    await process.communicate()


async def is_ready(client: httpx.AsyncClient, url: str) -> bool:
    try:
        return (await client.get(f"{url}/ready")).status_code == 200
    except httpx.TransportError:
        return False


async def test_sigterm_finishes_streams_and_refuses_new_work(
    process: tuple[asyncio.subprocess.Process, str], target: FakeTarget
) -> None:
    gateway, url = process
    target.hold_after = 1
    body = {**CHAT, "stream": True, "max_tokens": 6, "ignore_eos": True}
    async with httpx.AsyncClient(base_url=url, timeout=60.0) as client:
        stream = asyncio.create_task(client.post("/v1/chat/completions", json=body))
        await target.until(lambda: len(target.submits) == 1)
        gateway.send_signal(signal.SIGTERM)
        while (await client.get("/health")).status_code == 200:
            await asyncio.sleep(0.01)
        refused = await client.post("/v1/chat/completions", json=CHAT)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "server_draining")
        target.release.set()
        assert events((await stream).content)[-1] == "[DONE]"
    assert await asyncio.wait_for(gateway.wait(), 60.0) == 0


def _request(client: httpx.AsyncClient, body: object) -> httpx.Request:
    return client.build_request("POST", "/v1/chat/completions", json=body)


@pytest.mark.parametrize("process", [("--drain-grace-s", "0")], indirect=True)
@pytest.mark.parametrize("stream", [False, True])
async def test_what_is_left_at_the_end_of_the_grace_is_told_so(
    process: tuple[asyncio.subprocess.Process, str], target: FakeTarget, stream: bool
) -> None:
    gateway, url = process
    target.hold_after = 1
    body = {**CHAT, "stream": stream, "max_tokens": 6, "ignore_eos": True}
    async with httpx.AsyncClient(base_url=url, timeout=60.0) as client:
        answer = asyncio.create_task(client.send(_request(client, body), stream=True))
        await target.until(lambda: len(target.submits) == 1)
        if stream:
            await answer  # its head has come, with the first token
        gateway.send_signal(signal.SIGTERM)
        response = await answer
        content = await response.aread()
    error = events(content)[-1]["error"] if stream else response.json()["error"]
    assert (response.status_code, error["code"]) == (200 if stream else 503, "server_draining")
    assert "it gave requests 0 s to finish" in error["message"]
    _, log = await asyncio.wait_for(gateway.communicate(), 60.0)
    assert b"Traceback" not in log


async def test_the_demo_compares_answers_with_and_without_speculation(
    process: tuple[asyncio.subprocess.Process, str], target: FakeTarget, tokenizer: Tokenizer
) -> None:
    _, url = process
    await say(target, tokenizer, "the quick brown fox")
    out = io.StringIO()
    arguments = ["--base-url", f"{url}/v1", "one?", "two?"]
    assert await asyncio.to_thread(demo.main, arguments, out) == 0
    assert out.getvalue().count("the quick brown fox") == 4
    assert out.getvalue().count("identical token by token") == 2
    assert re.search(r"[2-3]\.\d\d tokens a round \(bonus included\)  \d+ rounds", out.getvalue())
    disabled = [submit.request.speculation_params.disabled for submit in target.submits]
    assert disabled == [False, True] * 3, "the first pair warms up"
    assert "times as fast over 2 answers of" in out.getvalue()
    assert "tokens/s, with the same tokens" in out.getvalue()


def _run(duration_s: float, rounds: int) -> demo.Run:
    metrics = {"num_spec_steps": rounds, "mean_acceptance_length": 2.0}
    return demo.Run(list(range(100)), 0.01, duration_s, metrics if rounds else None)


def test_the_demo_explains_a_loss_and_a_gain() -> None:
    loss = demo.conclusion([demo.Pair(_run(2.0, 50), _run(1.0, 0))])
    assert "Speculation was 0.50 times as fast" in loss
    assert "a round costs as much as 4.00 plain steps" in loss
    gain = demo.conclusion([demo.Pair(_run(0.5, 50), _run(1.0, 0))])
    assert "Speculation was 2.00 times as fast" in gain
    assert "loss" not in gain


def test_the_demo_says_when_the_target_mostly_went_without() -> None:
    text = demo.conclusion([demo.Pair(_run(1.0, 5), _run(1.0, 0))])
    assert "Only 10 of the tokens came from rounds with a draft" in text


def test_the_demo_says_when_no_draft_took_part() -> None:
    assert "nothing to compare" in demo.conclusion([demo.Pair(_run(1.0, 0), None)])


async def test_the_demo_notices_a_difference(
    process: tuple[asyncio.subprocess.Process, str], target: FakeTarget
) -> None:
    _, url = process
    target.reply = lambda request: [[20 + request.speculation_params.disabled, 0]]
    out = io.StringIO()
    assert await asyncio.to_thread(demo.main, ["--base-url", f"{url}/v1", "one?"], out) == 1
    assert "DIFFERENT" in out.getvalue()


async def test_the_demo_says_when_nothing_serves() -> None:
    out = io.StringIO()
    arguments = ["--base-url", f"http://127.0.0.1:{free_port()}/v1"]
    assert await asyncio.to_thread(demo.main, arguments, out) == 1
    assert "make serve" in out.getvalue()


def load(*arguments: str) -> GatewaySettings:
    return load_settings(GatewaySettings, service="gateway", arguments=arguments, env={})


def test_targets_repeat_and_the_maintenance_port_follows_the_port() -> None:
    settings = load("--target", "a:1", "--target", "b:2", "--port", "9000")
    assert settings.target == ("a:1", "b:2")
    assert settings.admin_port == 9001
    assert load().target == ("127.0.0.1:50051",)


@pytest.mark.parametrize("flag", ["--target", "--target-maintenance"])
def test_a_target_without_a_port_is_refused(flag: str) -> None:
    with pytest.raises(SettingsError, match=f"{flag} is 'target'; it must be HOST:PORT"):
        load(flag, "target")


def test_the_key_is_not_shown() -> None:
    assert "sesame" not in str(shown_settings(load("--api-key", "sesame")))


def test_every_bad_setting_is_named_at_once() -> None:
    with pytest.raises(SettingsError) as caught:
        load("--port", "70000", "--max-choices", "0")
    assert len(caught.value.problems) == 2


async def test_neither_keys_nor_prompts_reach_the_log(
    target: FakeTarget, model_folder: Path
) -> None:
    port = free_port()
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-m", "gateway", "--port", str(port), "--maintenance-port", "0"),
        *("--target", target.address, "--tokenizer", str(model_folder)),
        *("--log-level", "debug", "--log-format", "json"),
        cwd=ROOT,
        stderr=asyncio.subprocess.PIPE,
        env={**os.environ, "OUTRIDER_GATEWAY_API_KEY": "alice:open-sesame"},
    )
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=60.0) as client:
        while not await is_ready(client, str(client.base_url)):
            assert process.returncode is None, await process.communicate()
            await asyncio.sleep(0.05)
        for key, status in (("open-sesame", 200), ("wrong-sesame", 401)):
            body = {**CHAT, "messages": [{"role": "user", "content": "abracadabra"}]}
            answer = await client.post(
                "/v1/chat/completions",
                json={**body, "max_tokens": 4, "ignore_eos": True},
                headers={"authorization": f"Bearer {key}", "x-request-id": "known"},
            )
            assert answer.status_code == status
    process.send_signal(signal.SIGTERM)
    _, log = await asyncio.wait_for(process.communicate(), 60.0)
    lines = [json.loads(line) for line in log.splitlines()]
    [ended] = [line for line in lines if line["message"] == "request ended"]
    assert (ended["request_id"], ended["client"]) == ("known", "alice")
    for secret in (b"open-sesame", b"wrong-sesame", b"abracadabra"):
        assert secret not in log
