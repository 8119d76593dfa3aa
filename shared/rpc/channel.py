"""Client channels; the options and TLS of both ends of a connection. Files of TLS are read when a
server is bound or a channel is opened."""

from __future__ import annotations

from pathlib import Path

import grpc
from grpc import aio

from shared.tls import ClientTls, ServerTls

# A draft uploads its feature projection once, when it attaches: 100 MB at a hidden size of 4096,
# 400 MB at 8192.
MAX_MESSAGE_BYTES = 512 * 1024 * 1024
# The longest prompts and their candidates, many times over.
USUAL_MESSAGE_BYTES = 16 * 1024 * 1024
KEEPALIVE_INTERVAL_MS = 20_000
KEEPALIVE_TIMEOUT_MS = 10_000

Options = list[tuple[str, int | str]]


def channel_options() -> Options:
    """Returns the options of a client channel."""
    return [
        *_both_ends(),
        # Peers are addressed directly; an HTTP proxy of the environment is for the world outside.
        ("grpc.enable_http_proxy", 0),
    ]


def server_options(max_receive_bytes: int = MAX_MESSAGE_BYTES) -> Options:
    """Returns the options of a server, which must allow the pings its clients send."""
    return [
        *_both_ends(max_receive_bytes),
        # gRPC's own default tolerates a ping in five minutes and then ends the connection.
        ("grpc.http2.min_ping_interval_without_data_ms", KEEPALIVE_INTERVAL_MS // 2),
        # Two processes on one port would take turns with the connections, silently.
        ("grpc.so_reuseport", 0),
    ]


def _both_ends(max_receive_bytes: int = MAX_MESSAGE_BYTES) -> Options:
    """Limits, and pings that find a dead peer within 30 s, on a stream that is silent too."""
    return [
        ("grpc.max_receive_message_length", max_receive_bytes),
        ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
        ("grpc.keepalive_time_ms", KEEPALIVE_INTERVAL_MS),
        ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_MS),
        # Without it an unanswered ping is given a minute, whatever the line above says.
        ("grpc.http2.ping_timeout_ms", KEEPALIVE_TIMEOUT_MS),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
    ]


def server_credentials(tls: ServerTls) -> grpc.ServerCredentials:
    """Returns what a server shows; with a client CA it talks only to clients that CA signed."""
    return grpc.ssl_server_credentials(
        [(tls.key.read_bytes(), tls.cert.read_bytes())],
        root_certificates=_bytes(tls.client_ca),
        require_client_auth=tls.client_ca is not None,
    )


def channel_credentials(tls: ClientTls) -> grpc.ChannelCredentials:
    """Returns whom a client trusts and what it shows."""
    return grpc.ssl_channel_credentials(
        root_certificates=_bytes(tls.ca),
        private_key=_bytes(tls.key),
        certificate_chain=_bytes(tls.cert),
    )


def _bytes(path: Path | None) -> bytes | None:
    return None if path is None else path.read_bytes()


def open_channel(address: str, tls: ClientTls | None = None) -> aio.Channel:
    """Returns a channel to `address` (`host:port`, `dns:///name:port` or `unix:path`).

    Each channel has its own connection: a process that speaks to one peer in two roles must not
    have one role's flow control stall the other.

    Args:
        tls: None speaks plainly.
    """
    options = [*channel_options(), ("grpc.use_local_subchannel_pool", 1)]
    if tls is None:
        return aio.insecure_channel(address, options=options)
    if tls.server_name is not None:
        options.append(("grpc.ssl_target_name_override", tls.server_name))
    return aio.secure_channel(address, channel_credentials(tls), options=options)
