"""The answers being generated: what a drain waits for, and what can be aborted by its id."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Protocol


class OpenAnswer(Protocol):
    """An answer between its first and its last byte."""

    @property
    def request_id(self) -> str:
        """The `id` of the answer as the client sees it."""

    @property
    def trace_id(self) -> str:
        """The `x-request-id` of the request."""

    @property
    def owner(self) -> str:
        """The name of the key that asked for it."""

    def abort(self) -> None:
        """Ends it; its client is told."""


class OpenAnswers:
    """Knows the open answers: HTTP requests, however many choices each has."""

    def __init__(self) -> None:
        self._answers: set[OpenAnswer] = set()
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def num_open(self) -> int:
        return len(self._answers)

    def open(self, answer: OpenAnswer) -> None:
        self._answers.add(answer)
        self._idle.clear()

    def close(self, answer: OpenAnswer) -> None:
        self._answers.discard(answer)
        if not self._answers:
            self._idle.set()

    def abort(self, request_id: str, owner: str | None = None) -> int:
        """Aborts the answers known by this id or `x-request-id`; returns how many there were.

        Args:
            owner: whose answers alone it may reach; None reaches everybody's.
        """
        found = [
            answer
            for answer in self._answers
            if request_id in (answer.request_id, answer.trace_id) and owner in (None, answer.owner)
        ]
        for answer in found:
            answer.abort()
        return len(found)

    def abort_all(self, owner: str | None = None) -> int:
        """Aborts every answer, or every one of an owner; returns how many there were."""
        found = [answer for answer in self._answers if owner in (None, answer.owner)]
        for answer in found:
            answer.abort()
        return len(found)

    async def wait_idle(self, grace_s: float) -> int:
        """Waits until none is open, at most `grace_s` seconds; returns how many are left."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._idle.wait(), grace_s)
        return self.num_open
