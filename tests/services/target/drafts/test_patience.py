"""A draft that answers is waited for; one that has gone silent hardly."""

from __future__ import annotations

import pytest

from services.target.drafts.patience import (
    FIRST_PROBE_S,
    MISSES_UNTIL_COLD,
    SHORTEST_WAIT_S,
    STIRRING_FACTOR,
    WAIT_PER_TRIED_RESPONSE,
    Patience,
)


def _cold() -> Patience:
    patience = Patience(0.1)
    patience.heard(0.001)
    for step in range(MISSES_UNTIL_COLD):
        patience.stirred()
        assert patience.deadline_s(float(step)) > step
        patience.missed(step + 0.1)
    return patience


def test_silent_draft_is_waited_for_only_now_and_then() -> None:
    patience, now_s = _cold(), 100.0
    assert patience.deadline_s(now_s) > now_s
    for after_s, is_waited_for in (
        (0.01, False), (FIRST_PROBE_S, True), (2 * FIRST_PROBE_S, False), (3 * FIRST_PROBE_S, True)
    ):  # fmt: skip
        assert (patience.deadline_s(now_s + after_s) > now_s + after_s) is is_waited_for


def test_chance_of_a_silent_draft_is_long_once_something_arrives() -> None:
    patience = _cold()
    # Something of it arrived before it fell silent.
    assert patience.deadline_s(100.0) == pytest.approx(100.0 + STIRRING_FACTOR * SHORTEST_WAIT_S)
    assert patience.deadline_s(101.0) == pytest.approx(101.0 + SHORTEST_WAIT_S)
    patience.stirred()
    assert patience.deadline_s(110.0) == pytest.approx(110.0 + STIRRING_FACTOR * SHORTEST_WAIT_S)


def test_what_was_pushed_ahead_is_not_waited_for() -> None:
    """A draft that foresees nearly every verdict is worth the wait for the one that it does not."""
    patience = Patience(1.0)
    for _ in range(50):
        patience.heard(0.01)
        for _ in range(9):
            patience.in_time()
    assert patience.usual_wait_s is not None
    assert patience.usual_wait_s < 0.004
    assert patience.response_s == pytest.approx(0.01)
    assert patience.answer_rate > 0.9


def test_a_tree_that_was_pushed_ahead_breaks_a_silence() -> None:
    patience = _cold()
    patience.in_time()
    assert not patience.is_cold


def test_draft_that_answers_again_is_waited_for_again() -> None:
    patience = Patience(0.1)
    for step in range(MISSES_UNTIL_COLD):
        patience.missed(float(step))
    assert patience.is_cold
    patience.heard(0.01)
    assert patience.deadline_s(5.0) > 5.0


def test_wait_follows_the_usual_response_time_within_its_bound() -> None:
    patience = Patience(0.1)
    for _ in range(50):
        patience.heard(0.02)
    assert 0.07 < patience.wait_s < 0.09
    for _ in range(50):
        patience.heard(1.0)
    assert patience.wait_s == 0.1


def test_waits_in_vain_count() -> None:
    patience = Patience(0.1)
    patience.heard(0.02)
    assert patience.answer_rate == 1.0
    for step in range(40):
        patience.missed(float(step), waited_s=0.08)
        patience.heard(0.02)
    assert patience.usual_wait_s == pytest.approx(0.04, abs=0.01)
    assert patience.answer_rate == pytest.approx(0.5, abs=0.1)
    assert patience.response_s == pytest.approx(0.02), "nobody waits longer for it"


def test_rounds_of_one_step_count_as_one_miss() -> None:
    patience = Patience(0.1)
    for _ in range(MISSES_UNTIL_COLD):
        patience.missed(1.0)
    assert not patience.is_cold


@pytest.mark.parametrize(
    ("affordable_s", "stirs", "given_s"),
    [
        (0.0, False, WAIT_PER_TRIED_RESPONSE * 0.015),
        (0.04, False, 0.04),
        (1.0, False, 0.06),
        (1.0, True, STIRRING_FACTOR * 0.06),
    ],
    ids=str,
)
def test_try_is_as_long_as_it_may_cost(affordable_s: float, stirs: bool, given_s: float) -> None:
    patience = Patience(1.0)
    patience.heard(0.015)
    if stirs:
        patience.stirred()
    assert patience.try_deadline_s(5.0, affordable_s) - 5.0 == pytest.approx(given_s)


def test_first_answer_after_a_pause_says_more_than_those_before() -> None:
    patience = Patience(1.0)
    patience.heard(0.2)
    for step in range(MISSES_UNTIL_COLD):
        patience.missed(float(step), waited_s=0.8)
    patience.doubt()
    patience.heard(None)
    assert patience.is_doubtful, "it was late by what the draft had to catch up"
    patience.heard(0.01)
    assert not patience.is_doubtful
    assert patience.usual_wait_s == patience.response_s == pytest.approx(0.01)
    assert patience.answer_rate == 1.0
