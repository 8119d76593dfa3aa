"""The wire between a draft and a target, as a process that can be told its length and width."""

from __future__ import annotations

import math
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

    async def lay(
        self,
        *,
        there_ms: float = 0.0,
        back_ms: float = 0.0,
        there_bytes_per_s: float = math.inf,
        back_bytes_per_s: float = math.inf,
    ) -> None:
        """Sets how much later everything arrives, and how much arrives, towards the address and
        back."""
        await self._child.tell(f"{there_ms} {back_ms} {there_bytes_per_s} {back_bytes_per_s}")


@asynccontextmanager
async def running_wire(address: str, log: Path) -> AsyncIterator[WireProcess]:
    """Starts a wire to an address, short and wide, and stops it."""
    child = await Child.start("tests.bench.wire", ["--to", address], log, is_read=True)
    try:
        yield WireProcess(child, await child.first_line())
    finally:
        await child.stop()
