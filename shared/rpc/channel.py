"""Client channels."""

from __future__ import annotations

from grpc import aio

from shared.rpc.options import channel_options


def open_channel(address: str) -> aio.Channel:
    """Returns a channel to `address` (`host:port`, `dns:///name:port` or `unix:path`).

    Each channel has its own connection: a process that speaks to one peer in two roles must not
    have one role's flow control stall the other.
    """
    return aio.insecure_channel(
        address, options=[*channel_options(), ("grpc.use_local_subchannel_pool", 1)]
    )
