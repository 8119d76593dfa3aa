"""The port Prometheus scrapes."""

from __future__ import annotations

import socket
import ssl
import urllib.error
import urllib.request

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge

from shared.errors import SettingsError
from shared.telemetry.metrics_server import serve_metrics
from shared.tls import CertFolder, ClientTls


@pytest.fixture
def registry() -> CollectorRegistry:
    registry = CollectorRegistry()
    Counter("rides", "…", registry=registry).inc()
    return registry


def test_metrics_are_served_where_a_port_is_set(registry: CollectorRegistry) -> None:
    assert serve_metrics(registry, "127.0.0.1", None) is None
    port = serve_metrics(registry, "127.0.0.1", 0)
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as answer:
        assert b"rides_total 1.0" in answer.read()


def test_metrics_ask_for_a_certificate_where_the_servers_do(
    registry: CollectorRegistry, certs: CertFolder
) -> None:
    url = f"https://127.0.0.1:{serve_metrics(registry, '127.0.0.1', 0, certs.server_tls())}/metrics"
    with urllib.request.urlopen(url, context=certs.client_tls().context()) as answer:
        assert b"rides_total 1.0" in answer.read()
    # When the alert comes decides which call meets it.
    with pytest.raises((urllib.error.URLError, ConnectionError, ssl.SSLError)):
        urllib.request.urlopen(url, context=ClientTls(certs.ca).context()).read()


def test_a_taken_port_is_named(registry: CollectorRegistry) -> None:
    with socket.create_server(("127.0.0.1", 0)) as busy:
        port = busy.getsockname()[1]
        with pytest.raises(SettingsError, match=f"cannot serve metrics on 127.0.0.1:{port}"):
            serve_metrics(registry, "127.0.0.1", port)


def test_names_with_colons_keep_them_whatever_a_scraper_asks_for() -> None:
    registry = CollectorRegistry()
    Gauge("vllm:num_requests_running", "Requests in steps", registry=registry).set(3)
    url = f"http://127.0.0.1:{serve_metrics(registry, '127.0.0.1', 0)}/metrics"
    openmetrics = "application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4;q=0.5"
    for accept in ("*/*", openmetrics, f"{openmetrics};escaping=allow-utf-8"):
        request = urllib.request.Request(url, headers={"Accept": accept})
        with urllib.request.urlopen(request) as response:
            assert response.headers["Content-Type"].startswith("text/plain")
            assert b"\nvllm:num_requests_running 3.0\n" in response.read()
