"""Health probe for containers and launchers: `python -m shared.rpc.healthcheck ADDRESS`."""

from __future__ import annotations

import argparse
import asyncio
import sys
from pathlib import Path

from grpc import aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from shared.errors import SettingsError
from shared.rpc.channel import open_channel
from shared.settings import address_problems
from shared.tls import ClientTls, checked_client_tls


async def health_problem(
    address: str, *, service: str = "", timeout_s: float = 5.0, tls: ClientTls | None = None
) -> str | None:
    """Returns why the server at `address` does not report SERVING for `service` (empty: as a
    whole); None if it does."""
    async with open_channel(address, tls) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        request = health_pb2.HealthCheckRequest(service=service)
        try:
            response = await stub.Check(request, timeout=timeout_s)
        except aio.AioRpcError as error:
            return f"{error.code().name}: {error.details()}"
    is_serving = response.status == health_pb2.HealthCheckResponse.SERVING
    names = health_pb2.HealthCheckResponse.ServingStatus
    return None if is_serving else names.Name(response.status)


def main() -> None:
    """Exits with 0 when the server serves, with 1 otherwise."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("address", help="HOST:PORT")
    parser.add_argument("--service", default="", help="full service name; empty asks for all")
    parser.add_argument("--timeout", type=float, default=5.0, help="seconds")
    parser.add_argument("--tls-ca", type=Path, help="PEM; speaks TLS when set")
    parser.add_argument("--tls-cert", type=Path, help="PEM, shown to the server")
    parser.add_argument("--tls-key", type=Path, help="PEM, of --tls-cert")
    parser.add_argument("--tls-name", help="name in the server's certificate; the host's")
    arguments = parser.parse_args()
    if problems := address_problems("ADDRESS", [arguments.address]):
        sys.exit("\n".join(problems))
    try:
        tls = checked_client_tls(
            arguments.tls_ca,
            arguments.tls_cert,
            arguments.tls_key,
            arguments.tls_name,
            prefix="--tls-",
        )
    except SettingsError as error:
        sys.exit(error.message)
    address, service, timeout_s = arguments.address, arguments.service, arguments.timeout
    check = health_problem(address, service=service, timeout_s=timeout_s, tls=tls)
    if problem := asyncio.run(check):
        sys.exit(f"{address}: {problem}")


if __name__ == "__main__":
    main()
