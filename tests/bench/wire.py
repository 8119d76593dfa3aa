"""A wire of some length and width: a program that carries TCP to an address, each byte later by a
delay, and no more of them than the width.

    python -m tests.bench.wire --to HOST:PORT

prints the port it listens on. Lines on stdin are four numbers: milliseconds towards the address and
back, 0 at first, and bytes a second towards it and back, `inf` at first. A process of its own with
a thread a direction: an event loop rounds a wait to milliseconds, and shares its turns with
whatever else it does.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import socket
import sys
import threading
import time
from dataclasses import dataclass
from queue import SimpleQueue

CHUNK_BYTES = 65_536
BUFFER_BYTES = 65_536
"""Of the wire's sockets: a narrow wire holds its senders up before much waits in between."""


@dataclass(slots=True)
class Way:
    """One direction; may change at any time.

    Attributes:
        delay_s: from reading a chunk to writing it.
        bytes_per_s: that are read.
    """

    delay_s: float = 0.0
    bytes_per_s: float = math.inf


class Wire:
    """Carries connections until the process ends.

    Attributes:
        there, back: towards the address, and from it.
        port: where it listens.
    """

    def __init__(self, address: str) -> None:
        host, port = address.rsplit(":", 1)
        self._address = (host, int(port))
        self._listener = socket.create_server(("127.0.0.1", 0))
        # Connections that are accepted inherit it.
        self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, BUFFER_BYTES)
        self.there = Way()
        self.back = Way()
        self.port: int = self._listener.getsockname()[1]

    def serve(self) -> None:
        """Takes connections until `close`."""
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                _start(self._carry_both, near)

    def close(self) -> None:
        """Takes no more connections."""
        # Closing alone would leave `accept` waiting.
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _carry_both(self, near: socket.socket) -> None:
        try:
            far = socket.create_connection(self._address)
        except OSError:
            near.close()  # nobody is there yet; who dials will dial again
            return
        far.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, BUFFER_BYTES)
        for each in (near, far):
            each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        back = _start(_carry, far, near, self.back)
        _carry(near, far, self.there)
        back.join()
        near.close()
        far.close()


def _carry(source: socket.socket, sink: socket.socket, way: Way) -> None:
    """Reads as fast as the way is wide and writes later, so that the delay costs no bandwidth."""
    chunks: SimpleQueue[tuple[float, bytes]] = SimpleQueue()
    writing = _start(_write, sink, chunks)
    chunk = b"-"
    while chunk:
        try:
            chunk = source.recv(CHUNK_BYTES)
        except OSError:
            chunk = b""
        time.sleep(len(chunk) / way.bytes_per_s)
        chunks.put((time.monotonic() + way.delay_s, chunk))
    writing.join()


def _write(sink: socket.socket, chunks: SimpleQueue[tuple[float, bytes]]) -> None:
    with contextlib.suppress(OSError):
        while True:
            due_s, chunk = chunks.get()
            left_s = due_s - time.monotonic()
            if left_s > 0.0:
                time.sleep(left_s)
            if not chunk:
                break
            sink.sendall(chunk)
        sink.shutdown(socket.SHUT_WR)


def _start(function: object, *arguments: object) -> threading.Thread:
    thread = threading.Thread(target=function, args=arguments, daemon=True)  # type: ignore[arg-type]
    thread.start()
    return thread


def main() -> None:
    parser = argparse.ArgumentParser(prog="wire", description=__doc__)
    parser.add_argument("--to", required=True, metavar="HOST:PORT")
    wire = Wire(parser.parse_args().to)
    print(wire.port, flush=True)
    _start(wire.serve)
    for line in sys.stdin:
        there_ms, back_ms, wire.there.bytes_per_s, wire.back.bytes_per_s = map(float, line.split())
        wire.there.delay_s, wire.back.delay_s = there_ms / 1e3, back_ms / 1e3


if __name__ == "__main__":
    main()
