"""Channel arguments, the same thought on both ends of a connection."""

from __future__ import annotations

MAX_MESSAGE_BYTES = 16 * 1024 * 1024
KEEPALIVE_TIME_MS = 20_000
KEEPALIVE_TIMEOUT_MS = 10_000

Options = list[tuple[str, int]]


def channel_options() -> Options:
    """Returns the options of a client channel: pings find a dead peer within 30 s."""
    return [
        *_size_limits(),
        ("grpc.keepalive_time_ms", KEEPALIVE_TIME_MS),
        ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_MS),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
    ]


def server_options() -> Options:
    """Returns the options of a server, which must allow the pings its clients send."""
    return [
        *_size_limits(),
        ("grpc.keepalive_time_ms", KEEPALIVE_TIME_MS),
        ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_MS),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.http2.min_recv_ping_interval_without_data_ms", KEEPALIVE_TIME_MS // 2),
        ("grpc.http2.min_ping_interval_without_data_ms", KEEPALIVE_TIME_MS // 2),
        # Two processes on one port would take turns with the connections, silently.
        ("grpc.so_reuseport", 0),
    ]


def _size_limits() -> Options:
    return [
        ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
        ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ]
