"""Drafts as on another host, with a wire of some length between them and the target."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tests.bench.ahead_report import Compared, hit_cells
from tests.bench.pair import Pair
from tests.bench.passes import Load, Mode, Pass, measure
from tests.bench.wire_process import WireProcess
from tests.load.figures import table

ALONE = 0.5
"""Speculation counts as left alone where a larger share of the rounds has no tree for its sake."""


async def measure_delays(
    pair: Pair,
    wire: WireProcess,
    direct: Compared,
    load: Load,
    delays_ms: Sequence[float],
    num_repeats: int,
) -> Mapping[float, Compared]:
    """Returns the modes that matter through the wire, by its delay each way: what the target
    chooses, or the best synchronous and the best ahead mode. The first delay is none: what a
    program in between costs, and memory that is not shared.

    Args:
        direct: all modes without the wire.
    """
    found: dict[float, Compared] = {}
    for each_ms in (0.0, *delays_ms):
        await wire.lay(there_ms=each_ms, back_ms=each_ms)
        repeats = await measure(pair, direct.best_modes, direct.case, load, num_repeats)
        found[each_ms] = Compared(direct.case, direct.best_modes, repeats)
    await wire.lay()
    return found


def report(direct: Compared, delayed: Mapping[float, Compared]) -> str:
    """Returns the table of a case, what each delay takes from each mode, and from which on
    speculation is left alone."""
    header = (
        *("wire, each way", "mode", "tok/s", "vs plain", "loss", "of it by length"),
        *("tokens a round", "left alone", "in time", "late", "missed", "same answers"),
    )
    rows: list[Sequence[str]] = []
    for mode in direct.best_modes:
        rows.append(_row("none", mode, direct, direct, direct))
        for delay_ms, compared in delayed.items():
            rows.append(_row(f"{delay_ms:g} ms", mode, compared, direct, delayed[0.0]))
    parts = [direct.case.name, table(header, rows)]
    if direct.is_chosen:
        parts.append(_alone_from(delayed))
    return "\n".join(parts)


def _alone_from(delayed: Mapping[float, Compared]) -> str:
    """Says from which delay on speculation is left alone, however longer the wire gets."""
    alone_ms = None
    for delay_ms, compared in sorted(delayed.items(), reverse=True):
        if left_alone(compared.middle(compared.best_modes[0])) <= ALONE:
            break
        alone_ms = delay_ms
    if alone_ms is None:
        return f"speculation is in force at {max(delayed):g} ms each way"
    return f"speculation is left alone from {alone_ms:g} ms each way on"


def left_alone(one: Pass) -> float:
    """Returns the share of the rounds that went without a tree because plain steps are faster."""
    return min(one.per_round("outrider_target_paused_rounds"), 1.0)


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
        f"{middle.round_tokens:.2f}",
        f"{left_alone(middle):.0%}",
        *hit_cells(mode, middle),
        middle.same_answers(direct.plain),
    )
