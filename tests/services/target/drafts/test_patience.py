"""A draft that answers is waited for; one that has gone silent hardly."""

from __future__ import annotations

from services.target.drafts.patience import FIRST_PROBE_S, MISSES_UNTIL_COLD, Patience


def test_silent_draft_is_waited_for_only_now_and_then() -> None:
    patience = Patience(0.1)
    for step in range(MISSES_UNTIL_COLD):
        assert patience.deadline_s(float(step)) > step
        patience.missed(step + 0.1)
    now_s = 100.0
    assert patience.deadline_s(now_s) == now_s + 0.1
    assert patience.deadline_s(now_s + 0.01) == now_s + 0.01
    assert patience.deadline_s(now_s + FIRST_PROBE_S) > now_s + FIRST_PROBE_S
    assert patience.deadline_s(now_s + 2 * FIRST_PROBE_S) == now_s + 2 * FIRST_PROBE_S


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


def test_rounds_of_one_step_count_as_one_miss() -> None:
    patience = Patience(0.1)
    for _ in range(MISSES_UNTIL_COLD):
        patience.missed(1.0)
    assert not patience.is_cold
