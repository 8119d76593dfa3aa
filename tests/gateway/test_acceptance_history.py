"""Tokens a round over time: what ended when, by model, and no further back than half an hour."""

from __future__ import annotations

from gateway.metrics import INTERVAL_S, NUM_INTERVALS, AcceptanceHistory
from shared.generation import SpeculationStats

BEGIN_S = 1000 * INTERVAL_S


def _stats(rounds: int, accepted: int) -> SpeculationStats:
    return SpeculationStats(num_verified_rounds=rounds, num_accepted=accepted)


def test_each_interval_has_what_ended_in_it() -> None:
    now = [float(BEGIN_S)]
    history = AcceptanceHistory(lambda: now[0])
    history.add("demo", _stats(4, 8))
    now[0] += INTERVAL_S - 0.1
    history.add("demo", _stats(1, 0))
    history.add("other", _stats(9, 9))
    now[0] += 2 * INTERVAL_S
    history.add("demo", _stats(2, 6))
    history.add("demo", _stats(0, 0))
    found = history.intervals("demo")
    assert len(found) == NUM_INTERVALS
    assert [(e.begin_s, e.num_verified_rounds, e.num_accepted) for e in found[-3:]] == [
        (BEGIN_S, 5, 8),
        (BEGIN_S + INTERVAL_S, 0, 0),
        (BEGIN_S + 2 * INTERVAL_S, 2, 6),
    ]
    assert not any(each.num_verified_rounds for each in found[:-3])
    assert not any(each.num_verified_rounds for each in history.intervals("nobody"))


def test_what_is_too_old_goes() -> None:
    now = [float(BEGIN_S)]
    history = AcceptanceHistory(lambda: now[0])
    history.add("demo", _stats(4, 8))
    now[0] += (NUM_INTERVALS - 1) * INTERVAL_S
    assert history.intervals("demo")[0].num_accepted == 8
    now[0] += INTERVAL_S
    assert not any(each.num_accepted for each in history.intervals("demo"))
