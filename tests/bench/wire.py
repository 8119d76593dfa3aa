"""A wire of some length: a program that carries TCP to an address, each byte later by a delay.

    python -m tests.bench.wire --to HOST:PORT

prints the port it listens on. Lines on stdin, two numbers, are the milliseconds towards the address
and back; none at first. A process of its own with a thread a direction: an event loop rounds a
wait to milliseconds, and shares its turns with whatever else it does.
"""

from __future__ import annotations

import argparse
import contextlib
import socket
import sys
import threading
import time
from dataclasses import dataclass
from queue import SimpleQueue

CHUNK_BYTES = 65_536


@dataclass(slots=True)
class Delay:
    """Of one direction; may change at any time.

    Attributes:
        seconds: from reading a chunk to writing it.
    """

    seconds: float = 0.0


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
        self.there = Delay()
        self.back = Delay()
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
        for each in (near, far):
            each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        back = _start(_carry, far, near, self.back)
        _carry(near, far, self.there)
        back.join()
        near.close()
        far.close()


def _carry(source: socket.socket, sink: socket.socket, delay: Delay) -> None:
    """Reads at once and writes later, so that the delay costs no bandwidth."""
    chunks: SimpleQueue[tuple[float, bytes]] = SimpleQueue()
    writing = _start(_write, sink, chunks)
    chunk = b"-"
    while chunk:
        try:
            chunk = source.recv(CHUNK_BYTES)
        except OSError:
            chunk = b""
        chunks.put((time.monotonic() + delay.seconds, chunk))
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
        there_ms, back_ms = map(float, line.split())
        wire.there.seconds, wire.back.seconds = there_ms / 1e3, back_ms / 1e3


if __name__ == "__main__":
    main()
