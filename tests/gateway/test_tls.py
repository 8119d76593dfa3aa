"""The gateway's two sides, encrypted: HTTP in front, gRPC to the targets behind."""

from __future__ import annotations

import asyncio
import io
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import httpx
import pytest

from gateway.app import Gateway, create_app
from gateway.generation import TargetState
from gateway.http_server import HttpServer, listen
from gateway.pool import TargetPool
from gateway.settings import GatewaySettings
from gateway.target_link import LinkTiming
from services import demo
from shared.tls import CertFolder, ClientTls, ServerTls
from tests.gateway.driving import CHAT, eventually
from tests.helpers.fake_target import FakeTarget


@asynccontextmanager
async def _serving(gateway: Gateway, tls: ServerTls) -> AsyncIterator[str]:
    settings = GatewaySettings(tls_cert=tls.cert, tls_key=tls.key, http_client_ca=tls.client_ca)
    server = HttpServer(create_app(gateway), listen("127.0.0.1", 0), settings)
    server.start()
    try:
        yield f"https://127.0.0.1:{server.port}"
    finally:
        await server.stop(1)


async def _chat(url: str, tls: ClientTls) -> httpx.Response:
    async with httpx.AsyncClient(base_url=url, verify=tls.context(), timeout=60.0) as client:
        return await client.post("/v1/chat/completions", json={**CHAT, "max_tokens": 4})


async def test_http_is_encrypted_and_asks_nobody_for_a_certificate(
    gateway: Gateway, certs: CertFolder, other_certs: CertFolder
) -> None:
    async with _serving(gateway, certs.server_tls(asks_clients=False)) as url:
        assert (await _chat(url, ClientTls(certs.ca))).status_code == 200
        with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
            await _chat(url, ClientTls(other_certs.ca))


async def test_the_demo_finds_a_gateway_that_is_encrypted(
    gateway: Gateway, certs: CertFolder, other_certs: CertFolder
) -> None:
    async with _serving(gateway, certs.server_tls(asks_clients=False)) as url:
        words = ["--base-url", f"{url.replace('https:', 'http:')}/v1", "--max-tokens", "4", "one?"]
        for folder, exit_code in ((certs, 0), (other_certs, 1)):
            out = io.StringIO()
            flags = [*words, "--certs", str(folder.path)]
            assert await asyncio.to_thread(demo.main, flags, out) == exit_code, out.getvalue()
    assert out.getvalue().startswith(f"nothing answers at {words[1]}, with or without the certif")


async def test_http_clients_need_a_certificate_where_one_is_asked_for(
    gateway: Gateway, certs: CertFolder, other_certs: CertFolder
) -> None:
    async with _serving(gateway, certs.server_tls()) as url:
        assert (await _chat(url, certs.client_tls())).status_code == 200
        for stranger in (ClientTls(certs.ca), replace(other_certs.client_tls(), ca=certs.ca)):
            with pytest.raises((httpx.TransportError, ssl.SSLError)):
                await _chat(url, stranger)


@asynccontextmanager
async def _pool(target: FakeTarget, tls: ClientTls | None) -> AsyncIterator[TargetPool]:
    timing = LinkTiming(call_timeout_s=10.0, first_backoff_s=0.01, longest_backoff_s=0.05)
    settings = GatewaySettings(
        target=(target.address,),
        target_tls_ca=None if tls is None else tls.ca,
        target_tls_cert=None if tls is None else tls.cert,
        target_tls_key=None if tls is None else tls.key,
    )
    pool = TargetPool(settings, target.tokenizer_sha256, timing)
    pool.start()
    try:
        yield pool
    finally:
        await pool.close()


async def test_a_target_is_reached_over_mutual_tls_only(
    sha256: str, certs: CertFolder, other_certs: CertFolder
) -> None:
    async with FakeTarget(sha256, tls=certs.server_tls()) as target:
        async with _pool(target, certs.client_tls()) as pool:
            await eventually(lambda: pool.is_serving)
            [link] = pool.links
            assert await link.ask_model() == link.model, "asked over a channel of its own"
        for wrong in (ClientTls(certs.ca), other_certs.client_tls(), None):
            async with _pool(target, wrong) as pool:
                [link] = pool.links
                await eventually(lambda link=link: "UNAVAILABLE" in link.detail)
                assert link.state is TargetState.CONNECTING
    assert target.num_sessions == 1
