"""The wire carries what it is given, later by its delay."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator

import pytest

from tests.bench.wire import Wire


@pytest.fixture
def echo() -> Iterator[str]:
    """A server that returns everything of one connection."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            connection, _ = server.accept()
            with connection:
                while data := connection.recv(4096):
                    connection.sendall(data)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield f"127.0.0.1:{server.getsockname()[1]}"
        thread.join(10.0)


@pytest.fixture
def wire(echo: str) -> Iterator[Wire]:
    wire = Wire(echo)
    thread = threading.Thread(target=wire.serve)
    thread.start()
    yield wire
    wire.close()
    thread.join(10.0)
    assert not thread.is_alive()


def _dial(wire: Wire) -> socket.socket:
    return socket.create_connection(("127.0.0.1", wire.port), timeout=10.0)


def _read_all(connection: socket.socket) -> bytes:
    parts = []
    while data := connection.recv(65_536):
        parts.append(data)
    return b"".join(parts)


def test_bytes_arrive_whole_and_in_order_and_the_end_is_carried(wire: Wire) -> None:
    sent = bytes(range(256)) * 4_000
    with _dial(wire) as near:
        threading.Thread(target=_send, args=(near, sent), daemon=True).start()
        assert _read_all(near) == sent


def _send(connection: socket.socket, data: bytes) -> None:
    connection.sendall(data)
    connection.shutdown(socket.SHUT_WR)


def test_both_ways_take_their_time(wire: Wire) -> None:
    wire.there.delay_s, wire.back.delay_s = 0.02, 0.03
    with _dial(wire) as near:
        start_s = time.monotonic()
        near.sendall(b"x")
        assert near.recv(1) == b"x"
        assert time.monotonic() - start_s >= 0.05


def test_a_narrow_way_takes_its_time_and_the_other_does_not(wire: Wire) -> None:
    wire.back.bytes_per_s = 100_000.0
    sent, start_s = bytes(20_000), time.monotonic()
    with _dial(wire) as near:
        _send(near, sent)
        assert _read_all(near) == sent
    assert time.monotonic() - start_s >= 0.2


def test_a_wire_to_nobody_ends_connections() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
    wire = Wire(address)
    thread = threading.Thread(target=wire.serve)
    thread.start()
    with _dial(wire) as near:
        assert near.recv(1) == b""
    wire.close()
    thread.join(10.0)
