"""HTTP port for Prometheus, in a process without another HTTP server."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from prometheus_client import CollectorRegistry, make_wsgi_app, start_http_server

from shared.errors import SettingsError
from shared.tls import ServerTls


def serve_metrics(
    registry: CollectorRegistry, host: str, port: int | None, tls: ServerTls | None = None
) -> int | None:
    """Serves a registry on a thread; returns the port. Does nothing when `port` is None.

    Raises:
        SettingsError: the address is taken or not this host's.
    """
    if port is None:
        return None
    files: dict[str, str | bool | None] = {}
    if tls is not None:
        files = {"certfile": str(tls.cert), "keyfile": str(tls.key)}
        if tls.client_ca is not None:
            files |= {"client_cafile": str(tls.client_ca), "client_auth_required": True}
    try:
        server, _ = start_http_server(port, host, registry, **files)  # type: ignore[arg-type]
    except OSError as error:
        message = f"cannot serve metrics on {host}:{port}: {error.strerror}"
        raise SettingsError((message,)) from error
    app: Callable[..., Iterable[bytes]] = make_wsgi_app(registry)

    def answer(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        """Answers in Prometheus's text format, whatever the scraper asks for: in OpenMetrics, which
        Prometheus 2 asks for, the library would write `vllm:` as `vllm_`."""
        return app({**environ, "HTTP_ACCEPT": "text/plain"}, start_response)

    server.set_app(answer)
    return int(server.server_port)
