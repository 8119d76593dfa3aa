"""Tables of what was measured of a pair."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from tests.bench.passes import CHOSEN, Case, Mode, Pass
from tests.bench.scrape import Lookahead
from tests.load.figures import table

_VERDICTS = "outrider_target_lookahead_{}"
_BATCHES, _AHEAD = "outrider_draft_batch_seconds_sum", "outrider_draft_ahead_seconds_total"
_CAUGHT_UP = "outrider_draft_caught_up_seconds_total"
_AHEAD_STEPS = "outrider_draft_ahead_steps_total"


@dataclass(frozen=True, slots=True)
class Compared:
    """All modes in one case.

    Attributes:
        modes: plain decoding first.
        repeats: passes in the order of the modes.
    """

    case: Case
    modes: Sequence[Mode]
    repeats: Sequence[Sequence[Pass]]

    def passes(self, mode: Mode) -> list[Pass]:
        place = self.modes.index(mode)
        return [repeat[place] for repeat in self.repeats]

    def speed(self, mode: Mode) -> float:
        """Median tokens a second."""
        return statistics.median(each.tokens_per_s for each in self.passes(mode))

    def middle(self, mode: Mode) -> Pass:
        """Returns the pass whose speed is the median, the lower of two."""
        passes = sorted(self.passes(mode), key=lambda each: each.tokens_per_s)
        return passes[(len(passes) - 1) // 2]

    @property
    def plain(self) -> Pass:
        return self.middle(self.modes[0])

    @property
    def best_synchronous(self) -> Mode:
        return max((each for each in self.modes if each.shape and not each.budget), key=self.speed)

    @property
    def best_ahead(self) -> Mode:
        """What drafts ahead best; what the target chooses where there is no other mode."""
        if self.is_chosen:
            return CHOSEN
        return max((each for each in self.modes if each.budget), key=self.speed)

    @property
    def is_chosen(self) -> bool:
        """Whether the target chooses in all modes but plain decoding."""
        return CHOSEN in self.modes

    @property
    def best_modes(self) -> Sequence[Mode]:
        """The best synchronous and the best ahead mode, or what the target chooses."""
        return (CHOSEN,) if self.is_chosen else (self.best_synchronous, self.best_ahead)


def speeds(compared: Compared) -> str:
    """Returns the table of a case and the two ratios that matter."""
    header = (
        *("mode", "tok/s", "vs plain", "lowest", "highest", "tokens a round"),
        *("in time", "late", "missed", "gap us", "down", "up", "same answers"),
    )
    parts = [
        compared.case.name,
        table(header, [_speed_row(compared, mode) for mode in compared.modes]),
    ]
    if not compared.is_chosen:
        plain, synchronous, ahead = (
            compared.speed(mode) for mode in (compared.modes[0], *compared.best_modes)
        )
        parts.append(
            f"best synchronous split: {synchronous / plain:.2f} times plain; best ahead: "
            f"{ahead / plain:.2f} times plain, {ahead / synchronous:.2f} times that split"
        )
    return "\n".join(parts)


SPEED_NOTES = (
    "lowest, highest: tokens/s of the passes, of which tok/s is the median; in time, late, missed: "
    "share of a round's verdicts whose next tree was there, on its way, or not prepared for; gap: "
    "mean time in which the target's device waits for its host behind a verdict that was in time; "
    "down, up: bytes a round, from the target and to it"
)


def _speed_row(compared: Compared, mode: Mode) -> tuple[str, ...]:
    passes, middle = compared.passes(mode), compared.middle(mode)
    found = sorted(each.tokens_per_s for each in passes)
    worst = min(passes, key=lambda each: each.num_same(compared.plain))
    return (
        mode.name,
        f"{compared.speed(mode):.1f}",
        f"{compared.speed(mode) / compared.speed(compared.modes[0]):.2f}",
        f"{found[0]:.1f}",
        f"{found[-1]:.1f}",
        f"{middle.round_tokens:.2f}",
        *hit_cells(mode, middle),
        _gap(middle),
        *("-" if mode.is_plain else f"{_bytes(middle, way):.0f}" for way in ("sent", "received")),
        worst.same_answers(compared.plain),
    )


def hit_shares(one: Pass) -> tuple[float, float, float]:
    """Returns which share of the rounds had the next tree in time, late, and not at all."""
    hits, late, misses, absent = (
        one.per_round(_VERDICTS.format(name)) for name in ("hits", "late", "misses", "absent")
    )
    return hits, late, max(misses + absent - late, 0.0)


def hit_cells(mode: Mode, one: Pass) -> list[str]:
    """Returns these shares as cells; rounds on the device count none."""
    shares = hit_shares(one)
    is_counted = mode.is_ahead and any(shares)
    return [f"{share:.0%}" if is_counted else "-" for share in shares]


def _gap(one: Pass) -> str:
    count = one.counters.get("outrider_target_hit_gap_seconds_count", 0.0)
    total_s = one.counters.get("outrider_target_hit_gap_seconds_sum", 0.0)
    return f"{1e6 * total_s / count:.0f}" if count else "-"


def _bytes(one: Pass, direction: str) -> float:
    name = f'outrider_target_wire_bytes_total{{direction="{direction}"}}'
    return one.counters.get(name, 0.0) / max(one.num_rounds, 1)


def account(compared: Compared) -> str:
    """Returns what target and draft did in a step, by mode."""
    header = (
        *("ms a step", "all", "target busy", "device awaits host"),
        *("draft after verdict", "draft ahead", "draft busy", "steps ahead"),
    )
    return table(header, [_account_row(mode, compared.middle(mode)) for mode in compared.modes])


def _account_row(mode: Mode, one: Pass) -> tuple[str, ...]:
    whole_ms = 1e3 * one.duration_s / one.num_steps
    draft_ms = one.ms_a_step(_BATCHES, _AHEAD, _CAUGHT_UP)
    return (
        mode.name,
        f"{whole_ms:.2f}",
        f"{one.ms_a_step('outrider_target_busy_seconds_total'):.2f}",
        f"{one.ms_a_step('outrider_target_host_gap_seconds_total'):.2f}",
        f"{one.ms_a_step(_BATCHES):.2f}",
        f"{one.ms_a_step(_AHEAD):.2f}",
        f"{draft_ms / whole_ms:.0%}",
        f"{one.counters.get(_AHEAD_STEPS, 0.0) / one.num_steps:.1f}",
    )


def foreseen(compared: Compared, mode: Mode) -> str:
    """Returns, by accepted nodes, how often a mode had prepared for the verdict, and at which rank
    among the candidates for the same node."""
    sums: Counter[str] = Counter()
    for each in compared.passes(mode):
        # A label appears when it is first counted, so later passes may have more.
        sums.update(each.counters)
    found = Lookahead.of(sums)
    total = sum(found.hits.values()) + sum(found.misses.values())
    if not total:
        return f"{mode.name}: of no verdict is it counted whether anything was there in time"
    header = ("nodes accepted", "verdicts", *(f"rank {rank}" for rank in found.ranks), "missed")
    rows = []
    for position in found.positions:
        hits = [found.hits.get((position, rank), 0) for rank in found.ranks]
        missed = found.misses.get(position, 0)
        count = sum(hits) + missed
        shares = (f"{each / count:.1%}" for each in (*hits, missed))
        rows.append((position, f"{count / total:.1%}", *shares))
    return f"{mode.name}, verdicts for which anything was there in time\n{table(header, rows)}"
