"""`make certs`: a certificate authority, a server's and a client's certificate, for local trials.

Not for production: the authority's key lies beside the certificates that it signed.
"""

from __future__ import annotations

import argparse
import datetime
import ipaddress
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from shared.tls import CertFolder

SERVER_NAMES = ("localhost", "127.0.0.1", "::1", "target", "draft", "gateway")
"""The names of the loopback, and of the services in compose.yaml."""

_CLOCK_SKEW = datetime.timedelta(minutes=5)


@dataclass(frozen=True, slots=True)
class _Authority:
    certificate: x509.Certificate
    key: ec.EllipticCurvePrivateKey


def write_certs(
    folder: Path, *, server_names: Sequence[str] = SERVER_NAMES, num_days: int = 30
) -> CertFolder:
    """Writes `NAME.pem` and `NAME-key.pem` of `ca`, `server` and `client`; overwrites old files.

    Args:
        server_names: host names and IP addresses of the server's certificate.
        num_days: until all of them expire.
    """
    folder.mkdir(parents=True, exist_ok=True)
    authority = _authority(num_days)
    _write(folder, "ca", authority.certificate, authority.key)
    server_use, client_use = ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH
    _issue(folder, "server", authority, num_days, server_use, server_names)
    _issue(folder, "client", authority, num_days, client_use, ("outrider-client",))
    return CertFolder(folder)


def _authority(num_days: int) -> _Authority:
    key = ec.generate_private_key(ec.SECP256R1())
    name = _name("Outrider trial authority")
    builder = _builder(name, name, key, num_days).add_extension(
        x509.BasicConstraints(ca=True, path_length=0), critical=True
    )
    builder = builder.add_extension(_key_usage(signs_certificates=True), critical=True)
    builder = builder.add_extension(
        x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False
    )
    return _Authority(builder.sign(key, hashes.SHA256()), key)


def _issue(
    folder: Path,
    name: str,
    authority: _Authority,
    num_days: int,
    use: x509.ObjectIdentifier,
    alternative_names: Sequence[str],
) -> None:
    key = ec.generate_private_key(ec.SECP256R1())
    builder = _builder(_name(f"outrider {name}"), authority.certificate.subject, key, num_days)
    identifier = x509.AuthorityKeyIdentifier.from_issuer_public_key(authority.key.public_key())
    for extension, is_critical in (
        (x509.BasicConstraints(ca=False, path_length=None), True),
        (_key_usage(signs_certificates=False), True),
        (x509.ExtendedKeyUsage([use]), False),
        (x509.SubjectAlternativeName([_general_name(text) for text in alternative_names]), False),
        (identifier, False),
    ):
        builder = builder.add_extension(extension, critical=is_critical)
    _write(folder, name, builder.sign(authority.key, hashes.SHA256()), key)


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey, num_days: int
) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _CLOCK_SKEW)
        .not_valid_after(now + datetime.timedelta(days=num_days))
    )


def _name(common_name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name)])


def _general_name(text: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(text))
    except ValueError:
        return x509.DNSName(text)


def _key_usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _write(
    folder: Path, name: str, certificate: x509.Certificate, key: ec.EllipticCurvePrivateKey
) -> None:
    (folder / f"{name}.pem").write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    key_file = folder / f"{name}-key.pem"
    key_file.unlink(missing_ok=True)
    # Nobody else may read a key, not even between its creation and a later chmod.
    descriptor = os.open(key_file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(
            key.private_bytes(
                serialization.Encoding.PEM,
                serialization.PrivateFormat.PKCS8,
                serialization.NoEncryption(),
            )
        )


def main() -> int:
    parser = argparse.ArgumentParser(prog="certs", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path(".certs"), help="folder to write to")
    parser.add_argument("--name", action="append", default=[], help="a further name of the server")
    parser.add_argument("--days", type=int, default=30, help="until the certificates expire")
    flags = parser.parse_args()
    folder = write_certs(flags.out, server_names=(*SERVER_NAMES, *flags.name), num_days=flags.days)
    print(f"wrote ca, server and client certificates with their keys to {folder.path}/")
    return 0


if __name__ == "__main__":
    sys.exit(main())
