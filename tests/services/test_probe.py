"""The request that warms a stack up before it says that it is ready."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from services.probe import has_answered
from tests.helpers.serving import free_ports


class _Gateway(ThreadingHTTPServer):
    """Answers every request with a status, and notes what it was asked."""

    status = 200
    asked: tuple[tuple[str, Any], ...] = ()


class _Handler(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert isinstance(self.server, _Gateway)
        self.server.asked += ((self.path, body),)
        self.send_response(self.server.status)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, template: str, *arguments: object) -> None:
        """Says nothing."""


@pytest.fixture
def gateway() -> Iterator[_Gateway]:
    with _Gateway(("127.0.0.1", 0), _Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.mark.parametrize("status", [200, 401, 404])
async def test_a_few_tokens_are_asked_for_whatever_the_answer(
    gateway: _Gateway, status: int
) -> None:
    gateway.status = status
    assert await has_answered("127.0.0.1", gateway.server_address[1], "demo")
    [(path, body)] = gateway.asked
    assert path == "/v1/completions"
    assert body["model"] == "demo"
    assert body["max_tokens"] > 4, "some rounds with a draft"


async def test_nobody_there_has_not_answered() -> None:
    assert not await has_answered("127.0.0.1", next(free_ports(1)), "demo")
