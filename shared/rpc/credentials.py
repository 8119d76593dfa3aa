"""TLS of gRPC's two ends. Files are read when a server is bound or a channel is opened."""

from __future__ import annotations

from pathlib import Path

import grpc

from shared.tls import ClientTls, ServerTls


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
