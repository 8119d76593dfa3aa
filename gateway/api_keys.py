"""API keys with names, and the scope and limits of each."""

from __future__ import annotations

import enum
import hashlib
import hmac
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from shared.errors import SettingsError

ANONYMOUS = "anonymous"
_DEFAULT_NAME = "default"
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_SHA256 = re.compile(r"[0-9a-f]{64}")


class Scope(enum.Enum):
    """The scope of a key. Each scope includes the one before it."""

    USE = "use"
    OPERATE = "operate"
    ADMIN = "admin"

    @property
    def may_operate(self) -> bool:
        """Whether it reaches what is everybody's: caches, and requests of others."""
        return self is not Scope.USE


@dataclass(frozen=True, slots=True)
class KeyLimits:
    """Limits of one key; None means no limit.

    Attributes:
        requests_per_minute: POST requests.
        tokens_per_minute: prompt and output tokens.
        max_concurrent: requests open at once.
    """

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    max_concurrent: int | None = None


@dataclass(frozen=True, slots=True)
class ApiKey:
    """A key, known by its name; the key itself is not kept.

    Attributes:
        sha256: digest of the key.
        scope: what it may reach beside its own requests.
    """

    name: str
    sha256: bytes
    limits: KeyLimits
    scope: Scope = Scope.USE

    @classmethod
    def of(cls, name: str, key: str, limits: KeyLimits) -> ApiKey:
        return cls(name, hashlib.sha256(key.encode()).digest(), limits)


def find_key(keys: Sequence[ApiKey], given: str) -> ApiKey | None:
    """Returns the key that `given` is. Takes as long for a near miss as for a far one."""
    digest = hashlib.sha256(given.encode(errors="surrogateescape")).digest()
    found = None
    for key in keys:
        if hmac.compare_digest(key.sha256, digest):
            found = key
    return found


def keys_from_texts(texts: Sequence[str], limits: KeyLimits) -> tuple[ApiKey, ...]:
    """Reads keys given as `KEY` or `NAME:KEY`.

    Raises:
        SettingsError: a name or a key is missing or comes twice. The message shows no key.
    """
    keys = []
    for place, text in enumerate(texts, start=1):
        name, has_name, key = text.partition(":")
        if not has_name:
            name, key = _DEFAULT_NAME, text
        if not _NAME.fullmatch(name) or not key:
            message = f"--api-key {place} must be KEY or NAME:KEY, its name of letters, digits, _.-"
            raise SettingsError((message,))
        keys.append(ApiKey.of(name, key, limits))
    return tuple(keys)


def keys_from_file(path: Path, limits: KeyLimits) -> tuple[ApiKey, ...]:
    """Reads a TOML file with a table `[keys.NAME]` for each key.

    A table holds `key`, or `key_sha256` in hexadecimal, and its own limits where they differ:
    `requests_per_minute`, `tokens_per_minute`, `max_concurrent`; and its `scope`, `use` unless it
    is given.

    Raises:
        SettingsError: the file cannot be read, or a table is wrong. The message shows no key.
    """
    try:
        content = tomllib.loads(path.read_text())
    except OSError as error:
        raise SettingsError((f"--api-key-file {path}: {error.strerror}",)) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        # The parser's message may quote the line, and with it a key.
        raise SettingsError((f"--api-key-file {path} is not TOML",)) from error
    tables = content.get("keys")
    if not isinstance(tables, dict) or not tables or set(content) != {"keys"}:
        raise SettingsError((f"--api-key-file {path} must hold tables [keys.NAME], nothing else",))
    return tuple(_key(path, name, table, limits) for name, table in tables.items())


def check_keys(keys: Sequence[ApiKey]) -> None:
    """Raises:
    SettingsError: a name or a key comes twice.
    """
    for what, values in (("name", [k.name for k in keys]), ("key", [k.sha256 for k in keys])):
        if len(set(values)) < len(values):
            names = ", ".join(key.name for key in keys)
            raise SettingsError((f"two API keys share a {what}; the names are {names}",))


def _key(path: Path, name: str, table: object, limits: KeyLimits) -> ApiKey:
    where = f"--api-key-file {path}, key {name!r}"
    if not isinstance(table, dict) or not _NAME.fullmatch(name):
        raise SettingsError((f"{where} must be a table named by letters, digits, _.-",))
    known = {"key", "key_sha256", "scope", *(field.name for field in fields(KeyLimits))}
    unknown = sorted(set(table) - known)
    if unknown:
        raise SettingsError((f"{where} has unknown {', '.join(unknown)}",))
    return ApiKey(name, _digest(where, table), _limits(where, table, limits), _scope(where, table))


def _digest(where: str, table: Mapping[str, Any]) -> bytes:
    key, sha256 = table.get("key"), table.get("key_sha256")
    if isinstance(key, str) and key and sha256 is None:
        return hashlib.sha256(key.encode()).digest()
    if key is None and isinstance(sha256, str) and _SHA256.fullmatch(sha256):
        return bytes.fromhex(sha256)
    message = f"{where} needs one of key (text) and key_sha256 (64 hexadecimal digits)"
    raise SettingsError((message,))


def _scope(where: str, table: Mapping[str, Any]) -> Scope:
    given = table.get("scope", Scope.USE.value)
    try:
        return Scope(given)
    except ValueError:
        known = ", ".join(scope.value for scope in Scope)
        raise SettingsError((f"{where}: scope is {given!r}; it must be one of {known}",)) from None


def _limits(where: str, table: Mapping[str, Any], defaults: KeyLimits) -> KeyLimits:
    values = {field.name: getattr(defaults, field.name) for field in fields(KeyLimits)}
    for name in values:
        given = table.get(name, values[name])
        if given is not None and (type(given) is not int or given < 1):
            raise SettingsError((f"{where}: {name} is {given!r}; it must be at least 1",))
        values[name] = given
    return KeyLimits(**values)
