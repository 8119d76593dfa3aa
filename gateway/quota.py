"""Usage of each client against its limits."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar

from gateway.api_keys import ANONYMOUS, ApiKey, KeyLimits, Scope, find_key
from shared.errors import OutriderError, PermissionDenied, StatusCode

Clock = Callable[[], float]

_BUSY_RETRY_S = 1.0


class LimitExceeded(OutriderError):
    """A client asks for more than its key may use; another client is not held up by it."""

    code = StatusCode.RESOURCE_EXHAUSTED


class Allowance:
    """So much a minute, in advance for one minute at most (a token bucket).

    Taking may overdraw it, by what one request turns out to cost; the debt is waited off.
    """

    def __init__(self, per_minute: int, clock: Clock) -> None:
        self.per_minute = per_minute
        self._clock = clock
        self._level = float(per_minute)
        self._updated_s = clock()

    def wait_s(self, amount: float) -> float:
        """Returns the seconds until `amount` is there; 0 when it is."""
        now_s = self._clock()
        # A clock that jumps back must not take allowance away.
        gained = max(now_s - self._updated_s, 0.0) * self.per_minute / 60.0
        self._level = min(self._level + gained, float(self.per_minute))
        self._updated_s = now_s
        return max(amount - self._level, 0.0) * 60.0 / self.per_minute

    def take(self, amount: float) -> None:
        self._level -= amount


class Quota:
    """One client: counts, and refuses what is above its limits.

    Attributes:
        scope: what its key may reach.
        never_learnt: no draft may learn from its requests.
        num_requests, num_tokens: since the start.
        num_open: requests that are being answered.
        refusals: by what was exceeded: requests, tokens, concurrency.
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

    @contextmanager
    def request(self) -> Iterator[None]:
        """Holds a place while a request is answered.

        Raises:
            LimitExceeded: says which limit, and when to come back. Nothing is counted then.
        """
        self._check()
        if self._requests is not None:
            self._requests.take(1.0)
        self.num_requests += 1
        with self.place():
            yield

    @contextmanager
    def place(self) -> Iterator[None]:
        """Holds a concurrency slot for work that continues after the response."""
        self.num_open += 1
        try:
            yield
        finally:
            self.num_open -= 1

    def charge(self, num_tokens: int) -> None:
        """Counts the tokens of a request, when they are known."""
        self.num_tokens += num_tokens
        if self._tokens is not None:
            self._tokens.take(num_tokens)

    def _check(self) -> None:
        limits = self._limits
        if limits.max_concurrent is not None and self.num_open >= limits.max_concurrent:
            used = f"{self.num_open} requests are open; key {self.name!r} may have"
            raise self._refusal("concurrency", f"{used} {limits.max_concurrent}", _BUSY_RETRY_S)
        for what, allowance in (("requests", self._requests), ("tokens", self._tokens)):
            if allowance is not None and (wait_s := allowance.wait_s(1.0)) > 0.0:
                used = f"key {self.name!r} has used its {allowance.per_minute:,} {what} a minute"
                raise self._refusal(what, used, wait_s)

    def _refusal(self, what: str, message: str, wait_s: float) -> LimitExceeded:
        self.refusals[what] += 1
        reason = f"{what.upper()}_LIMIT_EXCEEDED"
        return LimitExceeded(message, reason=reason, retry_after_s=wait_s)


class Quotas:
    """The quotas of every key; without keys, one for everybody."""

    def __init__(
        self,
        keys: Sequence[ApiKey] = (),
        anonymous: KeyLimits | None = None,
        clock: Clock = time.monotonic,
        never_learnt: Collection[str] = (),
    ) -> None:
        """`never_learnt` names the keys that no draft may learn from."""
        self._keys = tuple(keys)
        known = [(key.name, key.limits, key.scope) for key in self._keys]
        if not known:
            known = [(ANONYMOUS, anonymous or KeyLimits(), Scope.ADMIN)]
        self._by_name = {
            name: Quota(name, limits, clock, scope, never_learnt=name in never_learnt)
            for name, limits, scope in known
        }

    @property
    def all(self) -> Sequence[Quota]:
        return tuple(self._by_name.values())

    def of(self, given: str) -> Quota | None:
        """Returns the quota of the key's client; None when nobody has it."""
        if not self._keys:
            return self._by_name[ANONYMOUS]
        key = find_key(self._keys, given)
        return None if key is None else self._by_name[key.name]


current_quota: ContextVar[Quota | None] = ContextVar("quota", default=None)
"""Of the client whose request is being answered."""


def owner_of_request() -> str:
    """Returns the name of the client's key: what the client keeps is found by it alone."""
    quota = current_quota.get()
    return "" if quota is None else quota.name


def check_may_operate(what: str) -> None:
    """Raises:
    PermissionDenied: the client's key is for its own requests only.
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
