"""The files of one certificate authority; `services.certs` writes them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from shared.tls import ClientTls, ServerTls


@dataclass(frozen=True, slots=True)
class CertFolder:
    """The folder with the files of one certificate authority."""

    path: Path

    @property
    def ca(self) -> Path:
        return self.path / "ca.pem"

    def server_tls(self, *, asks_clients: bool = True) -> ServerTls:
        """Returns the TLS files of a server; `asks_clients`: clients need a certificate."""
        ca = self.ca if asks_clients else None
        return ServerTls(self.path / "server.pem", self.path / "server-key.pem", ca)

    def client_tls(self) -> ClientTls:
        """Returns the TLS files of a client with a certificate."""
        return ClientTls(self.ca, self.path / "client.pem", self.path / "client-key.pem")
