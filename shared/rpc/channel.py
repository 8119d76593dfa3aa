"""gRPC client channels, and the options and TLS credentials of servers and channels. TLS files are
read when a server is bound or a channel is opened."""

from __future__ import annotations

from pathlib import Path

import grpc
from grpc import aio

from shared.tls import ClientTls, ServerTls

# A draft uploads its feature projection once, when it attaches: 100 MB at a hidden size of 4096,
# 400 MB at 8192.
MAX_MESSAGE_BYTES = 512 * 1024 * 1024
# Many times the size of the longest prompts and their candidates.
USUAL_MESSAGE_BYTES = 16 * 1024 * 1024
KEEPALIVE_INTERVAL_MS = 20_000
KEEPALIVE_TIMEOUT_MS = 10_000

Options = list[tuple[str, int | str]]


def channel_options() -> Options:
    return [
        *_both_ends(),
        # Peers are addressed directly; the environment's HTTP proxy is for hosts outside.
        ("grpc.enable_http_proxy", 0),
    ]


def server_options(max_receive_bytes: int = MAX_MESSAGE_BYTES) -> Options:
    """Returns the options of a server, which must allow the pings of its clients."""
    return [
        *_both_ends(max_receive_bytes),
        # By default gRPC ends a connection with more than one ping in five minutes.
        ("grpc.http2.min_ping_interval_without_data_ms", KEEPALIVE_INTERVAL_MS // 2),
        # Otherwise two processes could listen on one port and silently share its connections.
        ("grpc.so_reuseport", 0),
    ]


def _both_ends(max_receive_bytes: int = MAX_MESSAGE_BYTES) -> Options:
    """Message limits, and pings that detect a dead peer within 30 s, also without traffic."""
    return [
        ("grpc.max_receive_message_length", max_receive_bytes),
        ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
        ("grpc.keepalive_time_ms", KEEPALIVE_INTERVAL_MS),
        ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_MS),
        # Otherwise an unanswered ping times out after a minute, despite the line above.
        ("grpc.http2.ping_timeout_ms", KEEPALIVE_TIMEOUT_MS),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
    ]


def server_credentials(tls: ServerTls) -> grpc.ServerCredentials:
    """Returns the credentials of a server; with a client CA, clients need a certificate of it."""
    return grpc.ssl_server_credentials(
        [(tls.key.read_bytes(), tls.cert.read_bytes())],
        root_certificates=_bytes(tls.client_ca),
        require_client_auth=tls.client_ca is not None,
    )


def channel_credentials(tls: ClientTls) -> grpc.ChannelCredentials:
    return grpc.ssl_channel_credentials(
        root_certificates=_bytes(tls.ca),
        private_key=_bytes(tls.key),
        certificate_chain=_bytes(tls.cert),
    )


def _bytes(path: Path | None) -> bytes | None:
    return None if path is None else path.read_bytes()


def open_channel(address: str, tls: ClientTls | None = None) -> aio.Channel:
    """Returns a channel to `address` (`host:port`, `dns:///name:port` or `unix:path`).

    Each channel has its own connection: if a process has two roles with one peer, the flow control
    of one must not stall the other.

    Args:
        tls: None is without TLS.
    """
    options = [*channel_options(), ("grpc.use_local_subchannel_pool", 1)]
    if tls is None:
        return aio.insecure_channel(address, options=options)
    if tls.server_name is not None:
        options.append(("grpc.ssl_target_name_override", tls.server_name))
    return aio.secure_channel(address, channel_credentials(tls), options=options)
