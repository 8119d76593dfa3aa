"""TLS files of a server or client, independent of gRPC and HTTP."""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from pathlib import Path

from shared.errors import SettingsError


@dataclass(frozen=True, slots=True)
class ServerTls:
    """A server's certificate, and the authority of its clients' certificates. Files are PEM.

    Attributes:
        cert: the server's certificate, then the intermediates.
        key: of the certificate, without a passphrase.
        client_ca: authorities, one of which must have signed a client's certificate; None: clients
            need no certificate.
    """

    cert: Path
    key: Path
    client_ca: Path | None = None

    def context(self) -> ssl.SSLContext:
        """Returns the context of a server that speaks TLS through Python's `ssl`.

        Raises:
            OSError: a file cannot be read; it is an `ssl.SSLError` if its content is invalid.
        """
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.load_cert_chain(self.cert, self.key)
        if self.client_ca is not None:
            context.load_verify_locations(self.client_ca)
            context.verify_mode = ssl.CERT_REQUIRED
        return context

    def local_context(self, shown: ClientTls | None = None) -> ssl.SSLContext:
        """Returns the context of a client on the server's host, which trusts exactly the server's
        certificate file, whoever signed it and whatever name it has.

        Args:
            shown: has the certificate for a server that asks for one.

        Raises:
            OSError: as `context`.
        """
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.check_hostname = False
        context.verify_flags |= ssl.VerifyFlags.VERIFY_X509_PARTIAL_CHAIN
        context.load_verify_locations(self.cert)
        if shown is not None and shown.cert is not None:
            context.load_cert_chain(shown.cert, shown.key)
        return context


@dataclass(frozen=True, slots=True)
class ClientTls:
    """The authority that a client trusts, and the client's certificate. Files are PEM.

    Attributes:
        ca: authorities, one of which must have signed the server's certificate.
        cert, key: for servers that ask for a certificate; both or none.
        server_name: required name in the server's certificate; None is the dialled host.
    """

    ca: Path
    cert: Path | None = None
    key: Path | None = None
    server_name: str | None = None

    def context(self) -> ssl.SSLContext:
        """Returns the context of a client that speaks TLS through Python's `ssl`.

        Raises:
            OSError: see `ServerTls.context`.
        """
        context = ssl.create_default_context(cafile=self.ca)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        if self.cert is not None:
            context.load_cert_chain(self.cert, self.key)
        return context


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


def checked_server_tls(
    cert: Path | None, key: Path | None, client_ca: Path | None, *, ca_flag: str
) -> ServerTls | None:
    """Returns the TLS files of a server; None if no flag sets any.

    Args:
        ca_flag: the flag of `client_ca`, for messages.

    Raises:
        SettingsError: a flag is set without its partner, or its file cannot be used.
    """
    if cert is None and key is None and client_ca is None:
        return None
    if cert is None or key is None:
        needed = "" if client_ca is None else f", and {ca_flag} needs them"
        message = f"--tls-cert and --tls-key are set together or not at all{needed}"
        raise SettingsError((message,))
    tls = ServerTls(cert, key, client_ca)
    _check_files(tls, f"--tls-cert, --tls-key or {ca_flag}")
    return tls


def checked_client_tls(
    ca: Path | None, cert: Path | None, key: Path | None, server_name: str | None, *, prefix: str
) -> ClientTls | None:
    """Returns the TLS files of a client; None if no flag sets any.

    Raises:
        SettingsError: a flag is set without its partner, or its file cannot be used.
    """
    if ca is None:
        if cert is not None or key is not None or server_name is not None:
            message = f"{prefix}cert, {prefix}key and {prefix}name need {prefix}ca"
            raise SettingsError((message,))
        return None
    if (cert is None) != (key is None):
        raise SettingsError((f"{prefix}cert and {prefix}key are set together or not at all",))
    tls = ClientTls(ca, cert, key, server_name)
    _check_files(tls, f"{prefix}ca, {prefix}cert or {prefix}key")
    return tls


def _check_files(tls: ServerTls | ClientTls, flags: str) -> None:
    """Raises:
    SettingsError: a file is missing, or OpenSSL cannot use it.
    """
    files = [tls.cert, tls.key, tls.client_ca if isinstance(tls, ServerTls) else tls.ca]
    missing = [str(path) for path in files if path is not None and not path.is_file()]
    if missing:
        raise SettingsError(tuple(f"{flags}: there is no file {path}" for path in missing))
    try:
        tls.context()
    except OSError as error:
        raise SettingsError((f"{flags} cannot be used: {error}",)) from error
