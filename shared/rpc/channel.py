"""Client channels."""

from __future__ import annotations

from grpc import aio

from shared.rpc.credentials import channel_credentials
from shared.rpc.options import channel_options
from shared.tls import ClientTls


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
