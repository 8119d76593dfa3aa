"""The way into the engine, the same for every service that takes requests."""

from __future__ import annotations

import asyncio
import dataclasses
from contextlib import suppress
from dataclasses import dataclass, field

from services.target.engine import Engine
from services.target.grammars.compiler import GrammarCompiler
from services.target.requests.request import GenerationRequest
from services.target.requests.request_record import RequestRecorder
from shared.grammar import Grammar
from shared.rpc.lifecycle import Lifecycle


class OpenRequests:
    """A count on the event loop."""

    def __init__(self) -> None:
        self.count = 0
        self._is_idle = asyncio.Event()
        self._is_idle.set()

    def add(self) -> None:
        """A request was opened."""
        self.count += 1
        self._is_idle.clear()

    def remove(self) -> None:
        """A request finished, failed or was cancelled."""
        self.count -= 1
        if self.count == 0:
            self._is_idle.set()

    async def wait_idle(self, timeout_s: float) -> int:
        """Waits until none is open, at most `timeout_s`; returns how many are left."""
        with suppress(TimeoutError):
            await asyncio.wait_for(self._is_idle.wait(), timeout_s)
        return self.count


@dataclass(frozen=True, slots=True)
class Admission:
    """The checks that a request passes on the event loop before it is queued.

    Attributes:
        open_requests: of all services together; a drain waits for them.
    """

    engine: Engine
    grammars: GrammarCompiler
    lifecycle: Lifecycle
    recorder: RequestRecorder
    open_requests: OpenRequests = field(default_factory=OpenRequests)

    def check_open(self) -> None:
        """Raises:
        Unavailable: the target takes no new requests.
        """
        self.lifecycle.check_open()

    async def with_grammar(
        self, request: GenerationRequest, grammar: Grammar | None
    ) -> GenerationRequest:
        """Returns the request with its grammar compiled, if it has one.

        Raises:
            OutriderError: the grammar is refused.
        """
        if grammar is None:
            return request
        compiled = await self.grammars.compile(grammar)
        return dataclasses.replace(request, grammar=compiled)
