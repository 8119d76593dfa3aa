"""gRPC servers with health, reflection and one error policy."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from google.protobuf.descriptor import ServiceDescriptor
from grpc import aio
from grpc_health.v1 import health, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from shared.errors import SettingsError
from shared.rpc.credentials import server_credentials
from shared.rpc.interceptors import ErrorInterceptor
from shared.rpc.lifecycle import Lifecycle
from shared.rpc.options import MAX_MESSAGE_BYTES, server_options
from shared.tls import ServerTls

Registration = Callable[[aio.Server], None]


async def create_server(
    services: Sequence[ServiceDescriptor],
    register: Registration,
    lifecycle: Lifecycle,
    *,
    max_receive_bytes: int = MAX_MESSAGE_BYTES,
) -> aio.Server:
    """Returns a server, not started, of some services, health and reflection.

    Args:
        services: descriptors of the services that `register` adds, for reflection.
        register: adds the servicers, e.g. `add_TargetServiceServicer_to_server`.
        lifecycle: drives the server's health.
        max_receive_bytes: largest message that is read at all.
    """
    server = aio.server(
        interceptors=[ErrorInterceptor()], options=server_options(max_receive_bytes)
    )
    register(server)
    health_pb2_grpc.add_HealthServicer_to_server(await lifecycle.new_health_servicer(), server)
    names = [service.full_name for service in services]
    reflection.enable_server_reflection(
        [*names, health.SERVICE_NAME, reflection.SERVICE_NAME], server
    )
    return server


def bind(server: aio.Server, address: str, tls: ServerTls | None = None) -> int:
    """Binds `host:port`, port 0 for any, and returns the port.

    Args:
        tls: None speaks plainly.

    Raises:
        SettingsError: the address is taken or not this host's.
    """
    try:
        if tls is None:
            port = server.add_insecure_port(address)
        else:
            port = server.add_secure_port(address, server_credentials(tls))
    except RuntimeError as error:
        raise _cannot_listen(address) from error
    if port == 0:  # how grpcio before 1.60 fails
        raise _cannot_listen(address)
    return port


def _cannot_listen(address: str) -> SettingsError:
    return SettingsError(
        (f"cannot listen on {address}: the port is taken, or the address is not of this host",)
    )
