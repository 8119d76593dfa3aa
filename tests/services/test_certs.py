"""The files of `make certs`."""

from __future__ import annotations

import stat
from pathlib import Path

from cryptography import x509

from services.certs import SERVER_NAMES, CertFolder, write_certs


def _alternative_names(path: Path) -> set[str]:
    certificate = x509.load_pem_x509_certificate(path.read_bytes())
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    return {str(name.value) for name in names}


def test_the_server_has_the_names_of_loopback_and_compose(certs: CertFolder) -> None:
    assert _alternative_names(certs.path / "server.pem") == set(SERVER_NAMES)


def test_nobody_else_may_read_a_key(certs: CertFolder) -> None:
    keys = sorted(certs.path.glob("*-key.pem"))
    assert [key.name for key in keys] == ["ca-key.pem", "client-key.pem", "server-key.pem"]
    assert {stat.S_IMODE(key.stat().st_mode) for key in keys} == {0o600}


def test_written_again_everything_is_new_and_fits(tmp_path: Path) -> None:
    write_certs(tmp_path)
    before = (tmp_path / "ca.pem").read_bytes()
    folder = write_certs(tmp_path, server_names=("a.example",))
    assert (tmp_path / "ca.pem").read_bytes() != before
    folder.server_tls().context()
    folder.client_tls().context()
    assert _alternative_names(tmp_path / "server.pem") == {"a.example"}
