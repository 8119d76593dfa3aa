"""Keys and their files: what is read, what is refused, and that no message shows a key."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest

from gateway.api_keys import KeyLimits, find_key, keys_from_file, keys_from_texts
from gateway.settings import GatewaySettings
from services.draft.settings import DraftSettings
from services.target.settings import TargetSettings
from shared.errors import SettingsError
from shared.settings import load_settings, shown_settings

LIMITS = KeyLimits(requests_per_minute=10)


def _file(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "keys.toml"
    path.write_text(text)
    return path


def test_a_key_has_a_name_or_the_default_one() -> None:
    keys = keys_from_texts(["sesame", "alice:open:now"], LIMITS)
    assert [key.name for key in keys] == ["default", "alice"]
    found = find_key(keys, "open:now")
    assert found is not None
    assert (found.name, found.limits) == ("alice", LIMITS)
    for wrong in ("", "open", "alice:open:now", "Sesame", "\udcff"):
        assert find_key(keys, wrong) is None


def test_a_file_holds_keys_or_their_digests_and_limits_of_their_own(tmp_path: Path) -> None:
    digest = hashlib.sha256(b"hidden").hexdigest()
    path = _file(
        tmp_path,
        f'[keys.alice]\nkey = "open"\nmax_concurrent = 2\n[keys.bob]\nkey_sha256 = "{digest}"\n',
    )
    alice, bob = keys_from_file(path, LIMITS)
    assert alice.limits == KeyLimits(requests_per_minute=10, max_concurrent=2)
    assert bob.limits == LIMITS
    assert find_key((alice, bob), "hidden") is bob


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "must hold tables"),
        ('[keys.alice]\nkey = "secret"\n[other]\n', "nothing else"),
        ('key = "secret', "is not TOML"),
        ("[keys.alice]\n", "needs one of key"),
        ('[keys.alice]\nkey = "secret"\nkey_sha256 = "00"\n', "needs one of key"),
        ('[keys.alice]\nkey_sha256 = "secret"\n', "64 hexadecimal digits"),
        ('[keys.alice]\nkey = "secret"\nmax_concurent = 1\n', "unknown max_concurent"),
        ('[keys.alice]\nkey = "secret"\nmax_concurrent = 0\n', "max_concurrent is 0"),
        ('[keys.alice]\nkey = "secret"\nmax_concurrent = true\n', "max_concurrent is True"),
        ('[keys."a b"]\nkey = "secret"\n', "named by letters"),
    ],
)
def test_a_wrong_file_is_refused_without_showing_a_key(
    tmp_path: Path, text: str, message: str
) -> None:
    with pytest.raises(SettingsError) as caught:
        keys_from_file(_file(tmp_path, text), LIMITS)
    assert message in caught.value.message
    assert "secret" not in caught.value.message


def _load(*arguments: str, **env: str) -> GatewaySettings:
    return load_settings(GatewaySettings, service="gateway", arguments=arguments, env=env)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--api-key", "a:secret", "--api-key", "a:secret2"], "share a name"),
        (["--api-key", "a:secret", "--api-key", "b:secret"], "share a key"),
        (["--api-key", "a b:secret"], "--api-key 1 must be KEY or NAME:KEY"),
        (["--api-key", "secret", "--api-key", "alice:"], "--api-key 2 must be KEY or NAME:KEY"),
        (["--cors-origin", "https://a.example/path"], "without a path"),
        (["--api-key-file", "nowhere.toml"], "No such file"),
    ],
)
def test_wrong_keys_are_refused_at_start(arguments: list[str], message: str) -> None:
    with pytest.raises(SettingsError) as caught:
        _load(*arguments)
    assert message in caught.value.message
    assert "secret" not in caught.value.message


def test_keys_come_from_environment_and_file_together(tmp_path: Path) -> None:
    path = _file(tmp_path, '[keys.carol]\nkey = "c"\n')
    settings = _load(
        *("--api-key-file", str(path), "--key-requests-per-minute", "7"),
        OUTRIDER_GATEWAY_API_KEY="alice:a,bob:b",
    )
    assert [key.name for key in settings.api_keys] == ["alice", "bob", "carol"]
    assert {key.limits.requests_per_minute for key in settings.api_keys} == {7}
    assert "api-key" not in shown_settings(settings)


@pytest.mark.parametrize(
    ("kind", "service"),
    [(GatewaySettings, "gateway"), (TargetSettings, "target"), (DraftSettings, "draft")],
)
def test_maintenance_stays_on_loopback_unless_told_otherwise(kind: Any, service: str) -> None:
    settings = load_settings(kind, service=service, arguments=["--host", "0.0.0.0"], env={})
    assert settings.maintenance_host == "127.0.0.1"
