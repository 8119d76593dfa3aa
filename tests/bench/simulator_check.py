"""The simulator of `tests.bench.simulate` against what was measured, by times of the same run."""

from __future__ import annotations

from dataclasses import dataclass

from tests.bench.ahead_report import Compared, hit_shares
from tests.bench.passes import Case, Mode, Pass
from tests.bench.scenario_file import Measured
from tests.bench.simulated_split import Curve, Scenario, predict
from tests.load.figures import table


@dataclass(frozen=True, slots=True)
class Point:
    """A mode, and what a scenario makes of it."""

    mode: Mode
    scenario: Scenario
    measured: float

    @property
    def predicted(self) -> float:
        return predict(self.scenario).tokens_per_s


def points(compared: Compared, hop_ms: float) -> list[Point]:
    """Returns the best synchronous and the best ahead mode, and plain decoding.

    The time of a step is the mean of the synchronous pass of the same shape, or of plain decoding;
    that of drafts is the mean of a synchronous tree, or of a pass ahead; tokens a round, and
    verdicts that were prepared for, are counted in each mode's own pass. What is predicted is how
    they add up.

    Args:
        hop_ms: round trip of a message.
    """
    modes = (compared.modes[0], compared.best_synchronous, compared.best_ahead)
    return [
        Point(mode, _scenario(mode, compared, hop_ms), compared.middle(mode).tokens_per_s)
        for mode in modes
    ]


def report(found: list[Point]) -> str:
    """Returns the table of measured and predicted speeds."""
    header = ("simulator", "measured tok/s", "predicted tok/s", "error", "verify ms", "draft ms")
    rows = [
        (
            point.mode.name,
            f"{point.measured:.1f}",
            f"{point.predicted:.1f}",
            f"{100 * (point.predicted / point.measured - 1):+.1f} %",
            f"{predict(point.scenario).verify_ms:.2f}",
            f"{predict(point.scenario).draft_ms:.2f}",
        )
        for point in found
    ]
    return table(header, rows)


def measured(found: list[Point], case: Case) -> list[Measured]:
    """Returns the points as scenarios of a file, with which to predict them again."""
    return [
        Measured(f"{point.mode.name}; {case.name}", point.scenario, point.measured)
        for point in found
    ]


def _scenario(mode: Mode, compared: Compared, hop_ms: float) -> Scenario:
    one, timed = compared.middle(mode), compared.middle(Mode(mode.shape))
    batch = compared.case.concurrency
    verify_ms = _constant(timed.ms_a_step("outrider_target_busy_seconds_total"))
    if mode.shape is None:
        return Scenario(verify_ms, _constant(0.0), (0.0,), batch=batch)
    num_steps = mode.shape.num_steps
    num_forwards = num_steps + (mode.budget > 0)
    foreseen, late, _ = hit_shares(one)
    return Scenario(
        verify_ms=verify_ms,
        draft_step_ms=_constant(_draft_ms(mode, one) / num_forwards),
        acceptance=(level_acceptance(num_steps, one.round_tokens),),
        hop_ms=hop_ms,
        hit_rate=min(foreseen + late, 1.0) if mode.budget else 0.0,
        num_steps=(num_steps,),
        batch=batch,
        is_asynchronous=mode.budget > 0,
    )


def _draft_ms(mode: Mode, one: Pass) -> float:
    """Returns the time of trees: of a batch after the verdict, or of those for a verdict to come.
    A draft takes about a step a level for these, and goes on with the next round's in what time is
    left; some drafters take one step for all levels."""
    num_ahead = one.counters.get("outrider_draft_ahead_steps_total", 0.0)
    if not mode.budget or not num_ahead or mode.shape is None:
        return one.ms_a_step("outrider_draft_batch_seconds_sum")
    seconds = one.counters.get("outrider_draft_ahead_seconds_total", 0.0)
    ahead_a_step = min(num_ahead / one.num_steps, mode.shape.num_steps)
    return 1e3 * seconds / num_ahead * max(ahead_a_step, 1.0)


def _constant(value: float) -> Curve:
    return Curve(((1.0, value),))


def level_acceptance(num_steps: int, round_tokens: float) -> float:
    """Returns the probability that, as that of every level, gives so many tokens a round."""
    low, high = 0.0, 1.0
    for _ in range(50):
        middle = (low + high) / 2
        is_less = sum(middle**level for level in range(num_steps + 1)) < round_tokens
        low, high = (middle, high) if is_less else (low, middle)
    return (low + high) / 2
