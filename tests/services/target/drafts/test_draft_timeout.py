"""A draft that answers is waited for; one that has gone silent hardly."""

from __future__ import annotations

import pytest

from services.target.drafts.attachment import (
    ACTIVE_PROBE_FACTOR,
    FIRST_PROBE_S,
    MISSES_UNTIL_COLD,
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
    timeout, now_s = _cold(), 100.0
    assert timeout.deadline_s(now_s) > now_s
    for after_s, is_waited_for in (
        (0.01, False), (FIRST_PROBE_S, True), (2 * FIRST_PROBE_S, False), (3 * FIRST_PROBE_S, True)
    ):  # fmt: skip
        assert (timeout.deadline_s(now_s + after_s) > now_s + after_s) is is_waited_for


def test_chance_of_a_silent_draft_is_long_once_something_arrives() -> None:
    timeout = _cold()
    # Something of it arrived before it fell silent.
    assert timeout.deadline_s(100.0) == pytest.approx(100.0 + ACTIVE_PROBE_FACTOR * SHORTEST_WAIT_S)
    assert timeout.deadline_s(101.0) == pytest.approx(101.0 + SHORTEST_WAIT_S)
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
