"""TLS files of both ends of a connection, independent of gRPC and HTTP."""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from pathlib import Path

from shared.errors import SettingsError


@dataclass(frozen=True, slots=True)
class ServerTls:
    """A server's certificate, and the authority that clients are checked against. Files are PEM.

    Attributes:
        cert: its certificate, then the intermediates.
        key: of the certificate, without a passphrase.
        client_ca: a client must present a certificate that one of these signed; None asks for none.
    """

    cert: Path
    key: Path
    client_ca: Path | None = None

    def context(self) -> ssl.SSLContext:
        """Returns the context of a server that speaks TLS through Python's `ssl`.

        Raises:
            OSError: a file cannot be read; `ssl.SSLError` says that it is not what it should be.
        """
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.load_cert_chain(self.cert, self.key)
        if self.client_ca is not None:
            context.load_verify_locations(self.client_ca)
            context.verify_mode = ssl.CERT_REQUIRED
        return context

    def local_context(self, shown: ClientTls | None = None) -> ssl.SSLContext:
        """Returns the context of a client on the server's host, which has the server's certificate
        and trusts it whoever signed it and whatever name it holds.

        Args:
            shown: its certificate is shown to a server that asks for one.

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
    """The authority that a client trusts, and its own certificate. Files are PEM.

    Attributes:
        ca: certificates that may have signed the server's.
        cert, key: shown to servers that ask; both or none.
        server_name: name the server's certificate must hold; None is the host that was dialled.
    """

    ca: Path
    cert: Path | None = None
    key: Path | None = None
    server_name: str | None = None

    def context(self) -> ssl.SSLContext:
        """Returns the context of a client that speaks TLS through Python's `ssl`.

        Raises:
            OSError: a file cannot be read; `ssl.SSLError` says that it is not what it should be.
        """
        context = ssl.create_default_context(cafile=self.ca)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        if self.cert is not None:
            context.load_cert_chain(self.cert, self.key)
        return context


def checked_server_tls(
    cert: Path | None, key: Path | None, client_ca: Path | None, *, ca_flag: str
) -> ServerTls | None:
    """Returns the TLS of a server; None when nothing asks for it.

    Args:
        ca_flag: what `client_ca` was set by, for messages.

    Raises:
        SettingsError: a flag misses its partner, or its file cannot be used.
    """
    if cert is None and key is None and client_ca is None:
        return None
    if cert is None or key is None:
        needed = "" if client_ca is None else f", and {ca_flag} needs them"
        message = f"--tls-cert and --tls-key are set together or not at all{needed}"
        raise SettingsError((message,))
    tls = ServerTls(cert, key, client_ca)
    _try(tls, f"--tls-cert, --tls-key or {ca_flag}")
    return tls


def checked_client_tls(
    ca: Path | None, cert: Path | None, key: Path | None, server_name: str | None, *, prefix: str
) -> ClientTls | None:
    """Returns the TLS of a client; None when nothing asks for it.

    Raises:
        SettingsError: a flag misses its partner, or its file cannot be used.
    """
    if ca is None:
        if cert is not None or key is not None or server_name is not None:
            message = f"{prefix}cert, {prefix}key and {prefix}name need {prefix}ca"
            raise SettingsError((message,))
        return None
    if (cert is None) != (key is None):
        raise SettingsError((f"{prefix}cert and {prefix}key are set together or not at all",))
    tls = ClientTls(ca, cert, key, server_name)
    _try(tls, f"{prefix}ca, {prefix}cert or {prefix}key")
    return tls


def _try(tls: ServerTls | ClientTls, flags: str) -> None:
    """Names the file that is missing; what is wrong inside one, OpenSSL knows."""
    files = [tls.cert, tls.key, tls.client_ca if isinstance(tls, ServerTls) else tls.ca]
    missing = [str(path) for path in files if path is not None and not path.is_file()]
    if missing:
        raise SettingsError(tuple(f"{flags}: there is no file {path}" for path in missing))
    try:
        tls.context()
    except OSError as error:
        raise SettingsError((f"{flags} cannot be used: {error}",)) from error
