"""`make serve`: target, draft and gateway as child processes, stopped together.

Prints one line on stdout when requests are answered. SIGINT or SIGTERM stops gateway, draft and
target in that order. A draft that dies is started again; without gateway or target the stack ends
with exit code 1. Nothing here loads a model.
"""

from __future__ import annotations

import asyncio
import signal
import socket
import sys
from collections.abc import Sequence
from functools import partial

from services import probe
from services.child import Child
from services.serve_settings import NO_DRAFT, ServeSettings, parse
from services.serve_specs import HOST, client_tls, draft_spec, gateway_spec, target_spec
from services.stack import Part, Stack


def _services(settings: ServeSettings) -> tuple[Part, ...]:
    """Returns the parts in start order: who depends on whom goes last."""
    target, tls = f"{HOST}:{settings.target_port}", client_tls(settings)
    parts = [Part(Child(target_spec(settings)), lambda: probe.grpc_is_serving(target, tls))]
    maintenance = f"{HOST}:{settings.target_port + 1}"
    for count, algorithm in enumerate(settings.draft_ports, start=1):
        are_attached = partial(probe.has_attachments, maintenance, count, tls)
        child = Child(draft_spec(settings, algorithm))
        parts.append(Part(child, are_attached, is_expendable=True))
    gateway = Child(gateway_spec(settings))
    port = settings.gateway_port
    parts.append(Part(gateway, lambda: probe.http_is_ready(HOST, port, "/ready", tls)))
    return tuple(parts)


def _busy_ports(ports: Sequence[int]) -> tuple[int, ...]:
    """Returns the ports that something else listens on."""
    return tuple(port for port in ports if not _can_bind(port))


def _can_bind(port: int) -> bool:
    with socket.socket() as listener:
        # As the servers do, so that connections of an earlier run in TIME_WAIT are no obstacle.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((HOST, port))
        except OSError:
            return False
    return True


def _ready_line(settings: ServeSettings) -> str:
    drafts = NO_DRAFT
    if settings.algorithms:
        drafts = f"{', '.join(settings.algorithms)} ({settings.placement})"
    scheme = "http" if settings.certs is None else "https"
    return (
        f"ready: {scheme}://{HOST}:{settings.gateway_port}/v1"
        f"  speculation: {drafts}  logs: {settings.log_dir}/"
    )


async def _serve(settings: ServeSettings) -> int:
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    stack = Stack(_services(settings), settings.patience, _to_stderr)
    return await stack.run(stop, lambda: print(_ready_line(settings), flush=True))


def _to_stderr(text: str) -> None:
    print(f"serve: {text}", file=sys.stderr, flush=True)


def main() -> int:
    settings = parse(sys.argv[1:], description=__doc__)
    busy = _busy_ports(settings.ports)
    if busy:
        _to_stderr(f"ports in use on {HOST}: {', '.join(map(str, busy))}")
        return 1
    settings.log_dir.mkdir(parents=True, exist_ok=True)
    return asyncio.run(_serve(settings))


if __name__ == "__main__":
    sys.exit(main())
