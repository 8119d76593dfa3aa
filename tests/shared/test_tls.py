"""TLS settings: what fits together, and that every file is tried before anything serves."""

from __future__ import annotations

from pathlib import Path

import pytest

from gateway.settings import GatewaySettings
from services.draft.settings import DraftSettings
from services.target.settings import TargetSettings
from shared.errors import SettingsError
from shared.settings import load_settings
from shared.tls import CertFolder


def _gateway(*arguments: str) -> GatewaySettings:
    return load_settings(GatewaySettings, service="gateway", arguments=arguments, env={})


def _problems(*arguments: str) -> str:
    with pytest.raises(SettingsError) as caught:
        _gateway(*arguments)
    return caught.value.message


def _server_flags(folder: Path) -> tuple[str, ...]:
    files = (folder / "server.pem", folder / "server-key.pem")
    return ("--tls-cert", str(files[0]), "--tls-key", str(files[1]))


def test_nothing_is_encrypted_unless_asked_for() -> None:
    settings = _gateway()
    assert settings.server_tls is settings.target_tls is settings.http_tls is None


def test_http_clients_are_asked_by_a_flag_of_their_own(certs: CertFolder) -> None:
    settings = _gateway(*_server_flags(certs.path), "--tls-client-ca", str(certs.ca))
    assert settings.server_tls == certs.server_tls()
    assert settings.http_tls == certs.server_tls(asks_clients=False)
    settings = _gateway(*_server_flags(certs.path), "--http-client-ca", str(certs.ca))
    assert settings.http_tls == certs.server_tls()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--tls-cert", "x.pem"], "--tls-cert and --tls-key are set together"),
        (["--tls-client-ca", "x.pem"], "--tls-client-ca needs them"),
        (["--http-client-ca", "x.pem"], "--http-client-ca needs them"),
        (["--tls-cert", "x.pem", "--tls-key", "y.pem"], "there is no file x.pem"),
        (["--target-tls-cert", "x.pem"], "--target-tls-name need --target-tls-ca"),
        (["--target-tls-name", "target"], "--target-tls-name need --target-tls-ca"),
        (["--target-tls-ca", "x.pem"], "there is no file x.pem"),
    ],
)
def test_flags_that_do_not_fit_together_are_named(flags: list[str], message: str) -> None:
    assert message in _problems(*flags)


def test_a_key_of_another_certificate_is_refused(certs: CertFolder) -> None:
    files = ("--tls-cert", certs.path / "server.pem", "--tls-key", certs.path / "client-key.pem")
    assert "--tls-cert, --tls-key" in _problems(*map(str, files))


def test_a_file_that_is_no_certificate_is_refused(tmp_path: Path) -> None:
    (tmp_path / "ca.pem").write_text("hello")
    assert "--target-tls-ca" in _problems("--target-tls-ca", str(tmp_path / "ca.pem"))


def test_every_service_takes_its_files_from_shared_variables(certs: CertFolder) -> None:
    env = {
        "OUTRIDER_TLS_CERT": str(certs.path / "server.pem"),
        "OUTRIDER_TLS_KEY": str(certs.path / "server-key.pem"),
        "OUTRIDER_TLS_CLIENT_CA": str(certs.ca),
    }
    for kind, service in ((TargetSettings, "target"), (DraftSettings, "draft")):
        settings = load_settings(kind, service=service, arguments=(), env=env)
        assert settings.server_tls == certs.server_tls()
