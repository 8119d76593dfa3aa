"""Late answers of the fuzzer: suspects among others, findings alone."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable

import pytest

from tests.fuzz import connection, findings
from tests.fuzz.__main__ import _send_http
from tests.fuzz.connection import Connection
from tests.fuzz.findings import MAX_SECONDS, Findings


def _answers(*durations_s: float) -> Callable[[], Awaitable[float]]:
    """Returns a request that takes so long, one time after the other."""
    left = list(durations_s)

    async def send() -> float:
        return left.pop(0)

    return send


def _lines(*durations_s: float) -> list[str]:
    found = Findings()
    found.judge(durations_s[0], "/x", b"sent", _answers(*durations_s[1:]))
    asyncio.run(found.try_suspects())
    return found.lines


def test_a_request_late_among_others_is_no_finding_if_in_time_alone() -> None:
    assert _lines(9.0, 0.1) == []
    assert _lines(9.0, 3.0, 0.1) == []


def test_a_request_late_every_time_is_a_finding() -> None:
    assert _lines(9.0, 5.0, 3.0, 4.0) == ["/x took 3.0 s alone: b'sent'"]


def test_a_request_in_time_is_not_sent_again() -> None:
    assert _lines(MAX_SECONDS) == []  # `_answers` holds no further answer


async def test_an_answer_that_never_comes_is_a_finding_only_where_it_is_missing_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A busy host may keep a request for longer than any client waits."""
    monkeypatch.setattr(connection, "_TIMEOUT_S", 0.01)
    monkeypatch.setattr(findings, "MAX_SECONDS", 0.005)
    found = Findings()
    silent: list[asyncio.StreamWriter] = []
    server = await asyncio.start_server(lambda _, writer: silent.append(writer), "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with server, Connection(port) as client:
        await _send_http(client, port, random.Random(1), found)
        assert (len(found.suspects), found.lines) == (1, [])
        await found.try_suspects()
        for writer in silent:
            writer.transport.abort()
    [line] = found.lines
    assert "s alone" in line


async def test_a_server_may_close_when_the_time_is_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "_TIMEOUT_S", 0.01)
    silent: list[asyncio.StreamWriter] = []
    server = await asyncio.start_server(lambda _, writer: silent.append(writer), "127.0.0.1", 0)
    async with server, Connection(server.sockets[0].getsockname()[1]) as client:
        asked = asyncio.create_task(client.request("GET", "/health", b""))
        while (transport := client._answer.transport) is None:
            await asyncio.sleep(0)
        client._answer.transport = None  # what `connection_lost` does
        with pytest.raises(TimeoutError):
            await asked
        for each in (transport, *(writer.transport for writer in silent)):
            each.abort()
