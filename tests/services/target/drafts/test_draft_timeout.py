"""A draft that answers is waited for; one that has gone silent hardly."""

from __future__ import annotations

import pytest

from services.target.drafts.attachment import (
    ACTIVE_PROBE_FACTOR,
    MISSES_UNTIL_COLD,
    PROBE_SHARE,
    SHORTEST_GAP_S,
    SHORTEST_WAIT_S,
    DraftTimeout,
)


def _cold() -> DraftTimeout:
    timeout = DraftTimeout(0.1)
    timeout.responded(0.001)
    for step in range(MISSES_UNTIL_COLD):
        timeout.candidates_arrived()
        assert timeout.deadline_s(float(step)) > step
        timeout.missed(step + 0.1)
    return timeout


def test_silent_draft_is_waited_for_only_now_and_then() -> None:
    timeout, now_s, waited_s = _cold(), 100.0, 0.0
    while now_s < 160.0:
        deadline_s = timeout.deadline_s(now_s)
        waited_s += deadline_s - now_s
        now_s = deadline_s + 0.01
    # Something of it had arrived before it fell silent, so that the first probe is long.
    first_s = ACTIVE_PROBE_FACTOR * SHORTEST_WAIT_S
    assert waited_s - first_s == pytest.approx(PROBE_SHARE * 60.0, rel=0.1)


def test_a_short_probe_is_not_repeated_at_once() -> None:
    timeout = _cold()
    timeout.deadline_s(100.0, worthwhile_s=0.001)
    assert timeout.deadline_s(100.0 + 0.9 * SHORTEST_GAP_S) == 100.0 + 0.9 * SHORTEST_GAP_S
    now_s = 100.0 + 1.1 * SHORTEST_GAP_S
    assert timeout.deadline_s(now_s) > now_s


def test_nobody_waits_longer_than_can_pay() -> None:
    timeout = DraftTimeout(10.0)
    assert timeout.deadline_s(1.0, worthwhile_s=0.03) == pytest.approx(1.03)
    timeout.responded(1.0)
    assert timeout.deadline_s(1.0, worthwhile_s=0.03) == pytest.approx(1.03)


def test_chance_of_a_silent_draft_is_long_once_something_arrives() -> None:
    timeout = _cold()
    # Something of it arrived before it fell silent.
    assert timeout.deadline_s(100.0) == pytest.approx(100.0 + ACTIVE_PROBE_FACTOR * SHORTEST_WAIT_S)
    assert timeout.deadline_s(105.0) == pytest.approx(105.0 + SHORTEST_WAIT_S)
    timeout.candidates_arrived()
    assert timeout.deadline_s(110.0) == pytest.approx(110.0 + ACTIVE_PROBE_FACTOR * SHORTEST_WAIT_S)


def test_a_tree_that_was_pushed_ahead_breaks_a_silence() -> None:
    timeout = _cold()
    timeout.in_time()
    assert not timeout.is_cold


def test_draft_that_answers_again_is_waited_for_again() -> None:
    timeout = DraftTimeout(0.1)
    for step in range(MISSES_UNTIL_COLD):
        timeout.missed(float(step))
    assert timeout.is_cold
    timeout.responded(0.01)
    assert timeout.deadline_s(5.0) > 5.0


def test_wait_follows_the_usual_response_time_within_its_bound() -> None:
    timeout = DraftTimeout(0.1)
    for _ in range(50):
        timeout.responded(0.02)
    assert 0.07 < timeout.wait_s < 0.09
    for _ in range(50):
        timeout.responded(1.0)
    assert timeout.wait_s == 0.1


def test_rounds_of_one_step_count_as_one_miss() -> None:
    timeout = DraftTimeout(0.1)
    for _ in range(MISSES_UNTIL_COLD):
        timeout.missed(1.0)
    assert not timeout.is_cold
