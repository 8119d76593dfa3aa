"""The wire between a draft and a target, as a process that can be told its length."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from tests.bench.child import Child


class WireProcess:
    """Carries connections to an address.

    Attributes:
        address: to dial instead.
    """

    def __init__(self, child: Child, port: str) -> None:
        self._child = child
        self.address = f"127.0.0.1:{port}"

    async def delay(self, *, there_ms: float, back_ms: float) -> None:
        """Sets how much later everything arrives, towards the address and back."""
        await self._child.tell(f"{there_ms} {back_ms}")


@asynccontextmanager
async def running_wire(address: str, log: Path) -> AsyncIterator[WireProcess]:
    """Starts a wire to an address, without a delay, and stops it."""
    child = await Child.start("tests.bench.wire", ["--to", address], log, is_read=True)
    try:
        yield WireProcess(child, await child.first_line())
    finally:
        await child.stop()
