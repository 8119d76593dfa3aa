"""Named API keys with their scopes and limits, and the usage of each key's client."""

from __future__ import annotations

import enum
import hashlib
import re
import time
import tomllib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from shared.errors import OutriderError, PermissionDenied, SettingsError, StatusCode

ANONYMOUS = "anonymous"
_DEFAULT_NAME = "default"
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_SHA256 = re.compile(r"[0-9a-f]{64}")

Clock = Callable[[], float]
_BUSY_RETRY_S = 1.0
current_quota: ContextVar[Quota | None] = ContextVar("quota", default=None)
"""Quota of the client whose request is being answered."""


class Scope(enum.Enum):
    """The scope of a key. Each scope includes the one before it."""

    USE = "use"
    OPERATE = "operate"
    ADMIN = "admin"

    @property
    def may_operate(self) -> bool:
        """Whether the key may reach shared state: caches, and requests of other clients."""
        return self is not Scope.USE


@dataclass(frozen=True, slots=True)
class KeyLimits:
    """Limits of one key; None means no limit.

    Attributes:
        requests_per_minute: POST and PUT requests.
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
        scope: what the key may reach beside its own requests.
    """

    name: str
    sha256: bytes
    limits: KeyLimits
    scope: Scope = Scope.USE


def keys_from_texts(texts: Sequence[str], limits: KeyLimits) -> tuple[ApiKey, ...]:
    """Reads keys given as `KEY` or `NAME:KEY`.

    Raises:
        SettingsError: a name or a key is missing. The message shows no key.
    """
    keys = []
    for number, text in enumerate(texts, start=1):
        name, has_name, key = text.partition(":")
        if not has_name:
            name, key = _DEFAULT_NAME, text
        if not _NAME.fullmatch(name) or not key:
            message = (
                f"--api-key {number} must be KEY or NAME:KEY, its name of letters, digits, _.-"
            )
            raise SettingsError((message,))
        keys.append(ApiKey(name, _sha256_of(key), limits))
    return tuple(keys)


def keys_from_file(path: Path, limits: KeyLimits) -> tuple[ApiKey, ...]:
    """Reads a TOML file with a table `[keys.NAME]` for each key.

    A table holds `key`, or `key_sha256` in hexadecimal. Optional are limits of its own,
    `requests_per_minute`, `tokens_per_minute` and `max_concurrent`, and `scope`, by default `use`.

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
    SettingsError: two keys have the same name or the same digest.
    """
    for what, values in (("name", [k.name for k in keys]), ("key", [k.sha256 for k in keys])):
        if len(set(values)) < len(values):
            names = ", ".join(key.name for key in keys)
            raise SettingsError((f"two API keys share a {what}; the names are {names}",))


def _key(path: Path, name: str, table: object, limits: KeyLimits) -> ApiKey:
    where = f"--api-key-file {path}, key {name!r}"
    if not isinstance(table, dict) or not _NAME.fullmatch(name):
        raise SettingsError((f"{where} must be a table named by letters, digits, _.-",))
    allowed = {"key", "key_sha256", "scope", *(field.name for field in fields(KeyLimits))}
    unknown = sorted(set(table) - allowed)
    if unknown:
        raise SettingsError((f"{where} has unknown {', '.join(unknown)}",))
    return ApiKey(name, _digest(where, table), _limits(where, table, limits), _scope(where, table))


def _digest(where: str, table: Mapping[str, Any]) -> bytes:
    key, sha256 = table.get("key"), table.get("key_sha256")
    if isinstance(key, str) and key and sha256 is None:
        return _sha256_of(key)
    if key is None and isinstance(sha256, str) and _SHA256.fullmatch(sha256):
        return bytes.fromhex(sha256)
    message = f"{where} needs one of key (text) and key_sha256 (64 hexadecimal digits)"
    raise SettingsError((message,))


def _scope(where: str, table: Mapping[str, Any]) -> Scope:
    given = table.get("scope", Scope.USE.value)
    try:
        return Scope(given)
    except ValueError:
        scopes = ", ".join(scope.value for scope in Scope)
        raise SettingsError((f"{where}: scope is {given!r}; it must be one of {scopes}",)) from None


def _limits(where: str, table: Mapping[str, Any], defaults: KeyLimits) -> KeyLimits:
    values = {field.name: getattr(defaults, field.name) for field in fields(KeyLimits)}
    for name in values:
        given = table.get(name, values[name])
        if given is not None and (type(given) is not int or given < 1):
            raise SettingsError((f"{where}: {name} is {given!r}; it must be at least 1",))
        values[name] = given
    return KeyLimits(**values)


class LimitExceeded(OutriderError):
    """A client exceeds the limits of its key; other clients are not affected."""

    code = StatusCode.RESOURCE_EXHAUSTED


class Allowance:
    """A token bucket, filled at a rate per minute and holding one minute's amount at most.

    `take` may overdraw it, because the cost of a request is known only at its end. New requests
    then wait until the debt is refilled.
    """

    def __init__(self, per_minute: int, clock: Clock) -> None:
        self.per_minute = per_minute
        self._clock = clock
        self._level = float(per_minute)
        self._updated_s = clock()

    def wait_s(self, amount: float) -> float:
        """Returns the seconds until the bucket holds `amount`; 0 when it does."""
        now_s = self._clock()
        # A clock that jumps back must not empty the bucket.
        gained = max(now_s - self._updated_s, 0.0) * self.per_minute / 60.0
        self._level = min(self._level + gained, float(self.per_minute))
        self._updated_s = now_s
        return max(amount - self._level, 0.0) * 60.0 / self.per_minute

    def take(self, amount: float) -> None:
        self._level -= amount


class Quota:
    """The usage of one client's key; refuses requests above the key's limits.

    Attributes:
        scope: what the key may reach.
        never_learnt: no draft may learn from the client's requests.
        num_requests, num_tokens: counts since the start.
        num_open: requests that are being answered.
        refusals: counts by the exceeded limit: requests, tokens, concurrency.
    """

    def __init__(
        self,
        name: str,
        limits: KeyLimits,
        clock: Clock,
        scope: Scope = Scope.USE,
        *,
        never_learnt: bool = False,
    ) -> None:
        self.name = name
        self.scope = scope
        self.never_learnt = never_learnt
        self.num_requests = 0
        self.num_tokens = 0
        self.num_open = 0
        self.refusals = {"requests": 0, "tokens": 0, "concurrency": 0}
        self._limits = limits
        self._requests = _allowance(limits.requests_per_minute, clock)
        self._tokens = _allowance(limits.tokens_per_minute, clock)

    def admit(self) -> None:
        """Admits and counts a request, which then holds a `place`.

        Raises:
            LimitExceeded: names the limit and the time to retry. The request is not counted.
        """
        limits = self._limits
        if limits.max_concurrent is not None and self.num_open >= limits.max_concurrent:
            used = f"{self.num_open} requests are open; key {self.name!r} may have"
            raise self._refusal("concurrency", f"{used} {limits.max_concurrent}", _BUSY_RETRY_S)
        for what, allowance in (("requests", self._requests), ("tokens", self._tokens)):
            if allowance is not None and (wait_s := allowance.wait_s(1.0)) > 0.0:
                used = f"key {self.name!r} has used its {allowance.per_minute:,} {what} a minute"
                raise self._refusal(what, used, wait_s)
        if self._requests is not None:
            self._requests.take(1.0)
        self.num_requests += 1

    @contextmanager
    def place(self) -> Iterator[None]:
        """Holds a concurrency slot while a request is answered, or runs on after its response."""
        self.num_open += 1
        try:
            yield
        finally:
            self.num_open -= 1

    def charge(self, num_tokens: int) -> None:
        """Counts the tokens of an ended request."""
        self.num_tokens += num_tokens
        if self._tokens is not None:
            self._tokens.take(num_tokens)

    def _refusal(self, what: str, message: str, wait_s: float) -> LimitExceeded:
        self.refusals[what] += 1
        reason = f"{what.upper()}_LIMIT_EXCEEDED"
        return LimitExceeded(message, reason=reason, retry_after_s=wait_s)


class Quotas:
    """The quotas of all keys; without keys, one quota for everybody."""

    def __init__(
        self,
        keys: Sequence[ApiKey] = (),
        anonymous: KeyLimits | None = None,
        clock: Clock = time.monotonic,
        never_learnt: Collection[str] = (),
    ) -> None:
        """Args:
        never_learnt: names of the keys from whose requests no draft may learn.
        """
        self._is_open = not keys
        keys = keys or (ApiKey(ANONYMOUS, b"", anonymous or KeyLimits(), Scope.ADMIN),)
        self._by_digest = {
            key.sha256: Quota(
                key.name, key.limits, clock, key.scope, never_learnt=key.name in never_learnt
            )
            for key in keys
        }

    @property
    def all(self) -> Sequence[Quota]:
        return tuple(self._by_digest.values())

    def of(self, given: str) -> Quota | None:
        """Returns the quota of a key; None for an unknown key. Keys are looked up by digest, so a
        guessed key cannot be nearly right."""
        return self._by_digest.get(b"" if self._is_open else _sha256_of(given))


def owner_of_request() -> str:
    """Returns the name of the client's key, which owns everything that the client stores."""
    quota = current_quota.get()
    return "" if quota is None else quota.name


def check_may_operate(what: str) -> None:
    """Raises:
    PermissionDenied: the scope of the client's key covers its own requests only.
    """
    quota = current_quota.get()
    if quota is not None and not quota.scope.may_operate:
        message = (
            f"key {quota.name!r} may not {what}: its scope is {quota.scope.value}; "
            "it must be operate or admin"
        )
        raise PermissionDenied(message, reason="SCOPE_TOO_NARROW")


def _allowance(per_minute: int | None, clock: Clock) -> Allowance | None:
    return None if per_minute is None else Allowance(per_minute, clock)


def _sha256_of(key: str) -> bytes:
    return hashlib.sha256(key.encode(errors="surrogateescape")).digest()
