"""Keys and their files: what is read, what is refused, and that no message shows a key.

Who is let in and how often: rates, concurrency, browsers, sizes."""

from __future__ import annotations

import asyncio
import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from gateway.api_keys import Allowance, KeyLimits, Quotas, keys_from_file, keys_from_texts
from gateway.model_text import ModelText
from gateway.settings import GatewaySettings
from services.draft.settings import DraftSettings
from services.target.settings import TargetSettings
from shared.errors import SettingsError
from shared.settings import load_settings, shown_settings
from tests.gateway.driving import CHAT, MakeGateway, error_of, events, eventually, http_client
from tests.helpers.fake_target import FakeTarget

LIMITS = KeyLimits(requests_per_minute=10)


def _file(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "keys.toml"
    path.write_text(text)
    return path


def test_a_key_has_a_name_or_the_default_one() -> None:
    keys = keys_from_texts(["sesame", "alice:open:now"], LIMITS)
    assert [key.name for key in keys] == ["default", "alice"]
    assert {key.limits for key in keys} == {LIMITS}
    quotas = Quotas(keys)
    found = quotas.of("open:now")
    assert found is not None
    assert found.name == "alice"
    for wrong in ("", "open", "alice:open:now", "Sesame", "\udcff"):
        assert quotas.of(wrong) is None


def test_a_file_holds_keys_or_their_digests_and_limits_of_their_own(tmp_path: Path) -> None:
    digest = hashlib.sha256(b"hidden").hexdigest()
    path = _file(
        tmp_path,
        f'[keys.alice]\nkey = "open"\nmax_concurrent = 2\n[keys.bob]\nkey_sha256 = "{digest}"\n',
    )
    alice, bob = keys_from_file(path, LIMITS)
    assert alice.limits == KeyLimits(requests_per_minute=10, max_concurrent=2)
    assert bob.limits == LIMITS
    found = Quotas((alice, bob)).of("hidden")
    assert found is not None
    assert found.name == "bob"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "must hold tables"),
        ('[keys.alice]\nkey = "secret"\n[other]\n', "nothing else"),
        ('key = "secret', "is not TOML"),
        ("[keys.alice]\n", "needs one of key"),
        ('[keys.alice]\nkey = "secret"\nkey_sha256 = "00"\n', "needs one of key"),
        ('[keys.alice]\nkey_sha256 = "secret"\n', "64 hexadecimal digits"),
        ('[keys.alice]\nkey = "secret"\nmax_concurent = 1\n', "unknown max_concurent"),
        ('[keys.alice]\nkey = "secret"\nmax_concurrent = 0\n', "max_concurrent is 0"),
        ('[keys.alice]\nkey = "secret"\nmax_concurrent = true\n', "max_concurrent is True"),
        ('[keys."a b"]\nkey = "secret"\n', "named by letters"),
    ],
)
def test_a_wrong_file_is_refused_without_showing_a_key(
    tmp_path: Path, text: str, message: str
) -> None:
    with pytest.raises(SettingsError) as caught:
        keys_from_file(_file(tmp_path, text), LIMITS)
    assert message in caught.value.message
    assert "secret" not in caught.value.message


def _load(*arguments: str, **env: str) -> GatewaySettings:
    return load_settings(GatewaySettings, service="gateway", arguments=arguments, env=env)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--api-key", "a:secret", "--api-key", "a:secret2"], "share a name"),
        (["--api-key", "a:secret", "--api-key", "b:secret"], "share a key"),
        (["--api-key", "a b:secret"], "--api-key 1 must be KEY or NAME:KEY"),
        (["--api-key", "secret", "--api-key", "alice:"], "--api-key 2 must be KEY or NAME:KEY"),
        (["--cors-origin", "https://a.example/path"], "without a path"),
        (["--api-key-file", "nowhere.toml"], "No such file"),
    ],
)
def test_wrong_keys_are_refused_at_start(arguments: list[str], message: str) -> None:
    with pytest.raises(SettingsError) as caught:
        _load(*arguments)
    assert message in caught.value.message
    assert "secret" not in caught.value.message


def test_keys_come_from_environment_and_file_together(tmp_path: Path) -> None:
    path = _file(tmp_path, '[keys.carol]\nkey = "c"\n')
    settings = _load(
        *("--api-key-file", str(path), "--key-requests-per-minute", "7"),
        OUTRIDER_GATEWAY_API_KEY="alice:a,bob:b",
    )
    assert [key.name for key in settings.api_keys] == ["alice", "bob", "carol"]
    assert {key.limits.requests_per_minute for key in settings.api_keys} == {7}
    assert "api-key" not in shown_settings(settings)


@pytest.mark.parametrize(
    ("kind", "service"),
    [(GatewaySettings, "gateway"), (TargetSettings, "target"), (DraftSettings, "draft")],
)
def test_maintenance_stays_on_loopback_unless_told_otherwise(kind: Any, service: str) -> None:
    settings = load_settings(kind, service=service, arguments=["--host", "0.0.0.0"], env={})
    assert settings.maintenance_host == "127.0.0.1"


SHORT = {**CHAT, "max_tokens": 6, "ignore_eos": True}


@dataclass
class Clock:
    now_s: float = 0.0

    def __call__(self) -> float:
        return self.now_s


def _quotas(clock: Clock, **limits: int) -> Quotas:
    keys = keys_from_texts(["alice:a"], KeyLimits(**limits))
    return Quotas((*keys, *keys_from_texts(["bob:b"], KeyLimits())), clock=clock)


async def _chat(client: httpx.AsyncClient, key: str) -> httpx.Response:
    headers = {"authorization": f"Bearer {key}"}
    return await client.post("/v1/chat/completions", json=SHORT, headers=headers)


async def test_what_a_key_sends_is_never_learnt_where_it_is_listed(
    make_gateway: MakeGateway, target: FakeTarget
) -> None:
    keys = keys_from_texts(["alice:a", "bob:b"], KeyLimits())
    gateway = await make_gateway(target, quotas=Quotas(keys, never_learnt=["bob"]))
    async with http_client(gateway) as client:
        assert [(await _chat(client, key)).status_code for key in "ab"] == [200, 200]
    flags = [each.request.speculation_params.never_learnt for each in target.submits]
    assert flags == [False, True]


async def test_a_key_out_of_requests_waits_and_another_does_not(
    make_gateway: MakeGateway, target: FakeTarget
) -> None:
    clock = Clock()
    quotas = _quotas(clock, requests_per_minute=2)
    gateway = await make_gateway(target, quotas=quotas)
    async with http_client(gateway) as client:
        answers = [await _chat(client, "a") for _ in range(3)]
        assert [each.status_code for each in answers] == [200, 200, 429]
        assert answers[2].headers["retry-after"] == "30"
        error = (await error_of(answers[2]))[2:]
        message = "key 'alice' has used its 2 requests a minute"
        assert error == ("requests_limit_exceeded", message)
        assert (await client.get("/v1/models", headers={"x-api-key": "a"})).status_code == 200
        assert (await _chat(client, "b")).status_code == 200
        clock.now_s = 30.0
        assert (await _chat(client, "a")).status_code == 200
        metrics = (await client.get("/metrics")).text
    assert 'outrider_gateway_client_requests_total{client="alice"} 3.0' in metrics
    assert 'outrider_gateway_client_refusals_total{client="alice",limit="requests"} 1.0' in metrics
    assert len(target.submits) == 4


async def test_tokens_are_charged_when_a_request_has_ended(
    make_gateway: MakeGateway, target: FakeTarget
) -> None:
    clock = Clock()
    gateway = await make_gateway(target, quotas=_quotas(clock, tokens_per_minute=10))
    async with http_client(gateway) as client:
        usage = (await _chat(client, "a")).json()["usage"]
        refused = await _chat(client, "a")
        assert (await error_of(refused))[2] == "tokens_limit_exceeded"
        debt = usage["total_tokens"] - 10 + 1  # one token must be there to begin
        assert int(refused.headers["retry-after"]) == debt * 6
        clock.now_s = debt * 6.0
        assert (await _chat(client, "a")).status_code == 200


async def test_scored_prompts_are_charged(make_gateway: MakeGateway, target: FakeTarget) -> None:
    gateway = await make_gateway(target, quotas=_quotas(Clock(), tokens_per_minute=10))
    body = {"model": "fake", "prompt": [5] * 100, "max_tokens": 0, "echo": True, "logprobs": 1}
    async with http_client(gateway) as client:
        headers = {"authorization": "Bearer a"}
        scored = await client.post("/v1/completions", json=body, headers=headers)
        assert scored.status_code == 200
        refused = await client.post("/v1/completions", json=body, headers=headers)
        assert (await error_of(refused))[2] == "tokens_limit_exceeded"


async def test_every_request_that_generates_counts(
    make_gateway: MakeGateway, target: FakeTarget
) -> None:
    gateway = await make_gateway(target, quotas=_quotas(Clock(), requests_per_minute=1))
    body = {"text": "then", "sampling_params": {"max_new_tokens": 2}}
    async with http_client(gateway) as client:
        headers = {"authorization": "Bearer a"}
        assert (await client.put("/generate", json=body, headers=headers)).status_code == 200
        for method, path in (("PUT", "/generate"), ("GET", "/health_generate")):
            refused = await client.request(method, path, json=body, headers=headers)
            assert refused.status_code == 429
        assert (await client.get("/v1/models", headers=headers)).status_code == 200


async def test_what_no_target_takes_costs_no_tokens(
    make_gateway: MakeGateway, target: FakeTarget
) -> None:
    quotas = _quotas(Clock(), tokens_per_minute=10)
    gateway = await make_gateway(
        target, quotas=quotas, settings=GatewaySettings(retry_window_s=0.0)
    )
    await target.lifecycle.drain()
    await eventually(lambda: not gateway.pool.is_serving)
    async with http_client(gateway) as client:
        for _ in range(3):
            assert (await _chat(client, "a")).status_code == 503
    assert quotas.all[0].num_tokens == 0


async def test_open_requests_of_a_key_are_bounded_streams_included(
    make_gateway: MakeGateway, target: FakeTarget
) -> None:
    target.hold_after = 1
    gateway = await make_gateway(target, quotas=_quotas(Clock(), max_concurrent=1))
    async with http_client(gateway) as client:
        headers = {"authorization": "Bearer a"}
        body = {**SHORT, "stream": True}
        stream = asyncio.create_task(
            client.post("/v1/chat/completions", json=body, headers=headers)
        )
        await target.until(lambda: len(target.submits) == 1)
        refused = await _chat(client, "a")
        assert (await error_of(refused))[2] == "concurrency_limit_exceeded"
        assert refused.headers["retry-after"] == "1"
        aborted = await client.post("/abort_request", json={"rid": "nobody"}, headers=headers)
        assert aborted.status_code == 200
        cancelled = await client.post("/v1/responses/resp_1/cancel", headers=headers)
        assert cancelled.status_code == 404
        target.release.set()
        assert events((await stream).content)[-1] == "[DONE]"
        assert (await _chat(client, "a")).status_code == 200


async def test_without_keys_everybody_shares_the_limits(
    make_gateway: MakeGateway, target: FakeTarget
) -> None:
    gateway = await make_gateway(target, quotas=Quotas((), KeyLimits(requests_per_minute=1)))
    async with http_client(gateway) as client:
        assert (await client.post("/v1/chat/completions", json=SHORT)).status_code == 200
        assert (await client.post("/tokenize", json={"prompt": "the"})).status_code == 429


async def test_anthropic_clients_get_the_limit_in_their_shape(
    make_gateway: MakeGateway, target: FakeTarget
) -> None:
    quotas = _quotas(Clock(), requests_per_minute=1)
    gateway = await make_gateway(target, quotas=quotas)
    body = {"model": "fake", "max_tokens": 2, "messages": [{"role": "user", "content": "hi"}]}
    async with http_client(gateway) as client:
        client.headers["x-api-key"] = "a"
        assert (await client.post("/v1/messages", json=body)).status_code == 200
        refused = await client.post("/v1/messages", json=body)
    assert refused.status_code == 429
    assert refused.json()["error"]["type"] == "rate_limit_error"


def test_an_allowance_fills_up_to_a_minute_and_never_falls_with_the_clock() -> None:
    clock = Clock(100.0)
    allowance = Allowance(60, clock)
    assert allowance.wait_s(60.0) == 0.0
    allowance.take(90.0)
    assert allowance.wait_s(1.0) == 31.0
    clock.now_s = 40.0  # the clock was set back
    assert allowance.wait_s(1.0) == 31.0
    clock.now_s = 71.0
    assert allowance.wait_s(1.0) == 0.0
    clock.now_s = 10_000.0
    assert allowance.wait_s(61.0) == 1.0


@pytest.mark.parametrize("origins", [(), ("https://app.example",), ("*",)])
async def test_browsers_get_in_from_listed_sites_only(
    make_gateway: MakeGateway, target: FakeTarget, origins: tuple[str, ...]
) -> None:
    gateway = await make_gateway(
        target, api_key="sesame", settings=GatewaySettings(cors_origin=origins)
    )
    async with http_client(gateway) as client:
        for site in ("https://app.example", "https://evil.example"):
            preflight = {
                "origin": site,
                "access-control-request-method": "POST",
                "access-control-request-headers": "authorization",
            }
            is_allowed = "*" in origins or site in origins
            for method, url in (("POST", "/v1/chat/completions"), ("DELETE", "/v1/responses/x")):
                asked = {**preflight, "access-control-request-method": method}
                answer = await client.options(url, headers=asked)
                assert ("access-control-allow-origin" in answer.headers) == is_allowed
                assert answer.is_success == is_allowed
            headers = {"origin": site, "authorization": "Bearer sesame"}
            answer = await client.post("/v1/chat/completions", json=SHORT, headers=headers)
            assert answer.status_code == 200
            assert ("access-control-allow-origin" in answer.headers) == is_allowed
            assert "access-control-allow-credentials" not in answer.headers


async def test_a_prompt_is_measured_before_it_is_tokenized(
    make_gateway: MakeGateway, target: FakeTarget, model_folder: Path
) -> None:
    gateway = await make_gateway(target, text=ModelText.read(model_folder, 50))
    long = "x" * 51
    bodies = {
        "/v1/completions": {"prompt": long},
        "/v1/chat/completions": {"messages": [{"role": "user", "content": long}]},
        "/tokenize": {"prompt": long},
        "/generate": {"text": long},
    }
    async with http_client(gateway) as client:
        for path, body in bodies.items():
            status, _, code, message = await error_of(await client.post(path, json=body))
            assert (status, code) == (400, "prompt_too_large")
            assert message.endswith("characters; at most 50 are accepted")
    assert target.submits == []


async def test_templates_of_requests_are_off_until_their_length_is_bounded(
    make_gateway: MakeGateway, target: FakeTarget, text: ModelText
) -> None:
    body = {**SHORT, "chat_template": "{{ messages[0]['content'] }}!"}
    async with http_client(await make_gateway(target)) as client:
        refused = await client.post("/v1/chat/completions", json=body)
    assert (await error_of(refused))[:3] == (400, "chat_template", "request_templates_off")
    settings = GatewaySettings(max_template_characters=40)
    async with http_client(await make_gateway(target, settings=settings)) as client:
        assert (await client.post("/v1/chat/completions", json=body)).status_code == 200
        for template, code in (
            ("{{ messages }}" * 3, "chat_template_too_large"),
            ("{% for %}", "chat_template_malformed"),
            ("{{ ''.__class__.__mro__ }}", "messages_refused"),
        ):
            answer = await client.post(
                "/v1/chat/completions", json={**body, "chat_template": template}
            )
            assert (await error_of(answer))[2] == code
    [submit] = target.submits
    expected = await text.tokenizer.encode("then!", add_special_tokens=False)
    assert list(submit.request.prompt_token_ids) == expected
