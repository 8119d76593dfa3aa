"""The round logs of a pair of processes over a part of what they do."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

from tests.bench.pair import Pair, PairFailed, PairSettings
from tests.bench.round_svg import Rounds, read_rounds
from tests.bench.switched_log import LAST_RECORD

_PATIENCE_S = 10.0
_POLL_S = 0.02


async def record(pair: Pair, settings: PairSettings, act: Callable[[], Awaitable[None]]) -> Rounds:
    """Returns what both did meanwhile.

    Raises:
        PairFailed: a process does not write its log.
    """
    logs = [settings.round_log(name) for name in ("target", "draft")]
    await pair.log_rounds(is_on=True)
    await act()
    await pair.log_rounds(is_on=False)
    for log in logs:
        await _until_whole(log)
    return read_rounds(*logs)


async def _until_whole(log: Path) -> None:
    """Waits for the last record, which comes when the process has heard that it is over."""
    try:
        async with asyncio.timeout(_PATIENCE_S):
            while LAST_RECORD not in _end(log):
                await asyncio.sleep(_POLL_S)
    except TimeoutError:
        raise PairFailed(f"{log} is not written to") from None


def _end(log: Path) -> str:
    return log.read_text(encoding="utf-8")[-200:]
