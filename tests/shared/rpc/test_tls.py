"""Encrypted gRPC: who is let in, and whom a client believes."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import grpc
import pytest
from grpc import aio

from services import probe
from services.certs import CertFolder, write_certs
from shared.rpc.channel import open_channel
from shared.rpc.healthcheck import health_problem
from shared.tls import ClientTls
from tests.helpers.scripted_server import ScriptedServer, scripted_server


async def _answer(request: bytes, context: Any) -> bytes:
    return b"!" + request


async def _call(server: ScriptedServer, tls: ClientTls | None) -> bytes:
    async with open_channel(server.address, tls) as channel:
        method = channel.unary_unary("/scripted.Service/unary_unary")
        answer: bytes = await method(b"?", timeout=60.0)
        return answer


async def _refusal(server: ScriptedServer, tls: ClientTls | None) -> grpc.StatusCode:
    with pytest.raises(aio.AioRpcError) as caught:
        await _call(server, tls)
    return caught.value.code()


async def test_both_sides_know_each_other(certs: CertFolder) -> None:
    tls = certs.client_tls()
    async with scripted_server(certs.server_tls(), tls, unary_unary=_answer) as server:
        assert await _call(server, tls) == b"!?"
        await server.lifecycle.activate()
        assert await health_problem(server.address, tls=tls) is None
        assert await probe.grpc_is_serving(server.address, tls)


async def test_a_client_without_a_certificate_is_refused(certs: CertFolder) -> None:
    bare = ClientTls(certs.ca)
    async with scripted_server(certs.server_tls(), unary_unary=_answer) as server:
        assert await _refusal(server, bare) is grpc.StatusCode.UNAVAILABLE
        assert await _refusal(server, None) is grpc.StatusCode.UNAVAILABLE
        assert not await probe.grpc_is_serving(server.address, bare)
    # Where no certificate is asked for, the same client gets in.
    async with scripted_server(certs.server_tls(asks_clients=False), unary_unary=_answer) as server:
        assert await _call(server, bare) == b"!?"


async def test_a_client_of_another_authority_is_refused(
    certs: CertFolder, other_certs: CertFolder
) -> None:
    stranger = replace(other_certs.client_tls(), ca=certs.ca)
    async with scripted_server(certs.server_tls(), unary_unary=_answer) as server:
        assert await _refusal(server, stranger) is grpc.StatusCode.UNAVAILABLE


async def test_a_server_of_another_authority_is_not_believed(
    certs: CertFolder, other_certs: CertFolder
) -> None:
    async with scripted_server(
        other_certs.server_tls(asks_clients=False), unary_unary=_answer
    ) as server:
        assert await _refusal(server, ClientTls(certs.ca)) is grpc.StatusCode.UNAVAILABLE


async def test_the_name_in_the_certificate_is_checked(certs: CertFolder) -> None:
    tls = certs.client_tls()
    async with scripted_server(certs.server_tls(), unary_unary=_answer) as server:
        assert await _call(server, replace(tls, server_name="target")) == b"!?"
        refused = await _refusal(server, replace(tls, server_name="elsewhere.example"))
    assert refused is grpc.StatusCode.UNAVAILABLE


async def test_a_certificate_for_another_host_is_not_believed(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    folder = write_certs(tmp_path_factory.mktemp("elsewhere"), server_names=("elsewhere.example",))
    async with scripted_server(folder.server_tls(), unary_unary=_answer) as server:
        assert await _refusal(server, folder.client_tls()) is grpc.StatusCode.UNAVAILABLE


async def test_a_plain_client_of_a_plain_server_needs_nothing() -> None:
    async with scripted_server(unary_unary=_answer) as server:
        assert await asyncio.wait_for(_call(server, None), 60.0) == b"!?"
