"""The best modes with a wire of some length between target and draft."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tests.bench.ahead_report import Compared, hit_shares
from tests.bench.pair import Pair
from tests.bench.passes import Load, Mode, measure
from tests.bench.wire_process import WireProcess
from tests.load.figures import table


async def measure_delays(
    pair: Pair,
    wire: WireProcess,
    direct: Compared,
    load: Load,
    delay_ms: float,
    num_repeats: int,
) -> Mapping[float, Compared]:
    """Returns the best synchronous and the best ahead mode through the wire, by its delay each way:
    without one, which is what the relay itself costs, and with it.

    Args:
        direct: all modes without the wire.
    """
    modes = (direct.best_synchronous, direct.best_ahead)
    found: dict[float, Compared] = {}
    for each_ms in (0.0, delay_ms):
        await wire.delay(there_ms=each_ms, back_ms=each_ms)
        repeats = await measure(pair, modes, direct.case, load, num_repeats)
        found[each_ms] = Compared(direct.case, modes, repeats)
    await wire.delay(there_ms=0.0, back_ms=0.0)
    return found


def report(direct: Compared, delayed: Mapping[float, Compared]) -> str:
    """Returns the table, and what each delay takes from either mode."""
    header = (
        *("wire, each way", "mode", "tok/s", "vs plain", "loss", "of it by length"),
        *("in time", "late", "missed", "same answers"),
    )
    modes = (direct.best_synchronous, direct.best_ahead)
    rows: list[Sequence[str]] = []
    for mode in modes:
        rows.append(_row("none", mode, direct, direct, direct))
        for delay_ms, compared in delayed.items():
            rows.append(_row(f"{delay_ms:g} ms", mode, compared, direct, delayed[0.0]))
    return table(header, rows)


def _row(
    name: str, mode: Mode, compared: Compared, direct: Compared, relayed: Compared
) -> tuple[str, ...]:
    speed, middle = compared.speed(mode), compared.middle(mode)
    return (
        name,
        mode.name,
        f"{speed:.1f}",
        f"{speed / direct.speed(direct.modes[0]):.2f}",
        f"{1 - speed / direct.speed(mode):.1%}",
        f"{1 - speed / relayed.speed(mode):.1%}",
        *(f"{share:.0%}" if mode.budget else "-" for share in hit_shares(middle)),
        f"{middle.num_same(direct.plain)}/{len(middle.answers)}",
    )
