"""The host polls for the end of a round, and launches the next one, shortly before that end."""

from __future__ import annotations

import pytest

from services.target.rounds.round_steps import POLL_S, DeviceTimes, RoundWait


def test_nothing_known_is_looked_at_all_the_time() -> None:
    assert RoundWait().sleep_s(0.0) == POLL_S


def test_most_of_a_round_is_slept_through() -> None:
    wait = RoundWait()
    wait.observe_round(0.010)
    assert wait.sleep_s(0.001) == pytest.approx(0.008)
    assert wait.sleep_s(0.0088) == pytest.approx(0.0002)
    assert wait.sleep_s(0.009) == POLL_S
    assert wait.sleep_s(5.0) == POLL_S


def test_a_quicker_round_counts_at_once_and_slower_ones_by_and_by() -> None:
    wait = RoundWait()
    wait.observe_round(0.010)
    wait.observe_round(0.004)
    assert wait.sleep_s(0.0) == pytest.approx(0.0036)
    wait.observe_round(0.010)
    assert wait.sleep_s(0.0) == pytest.approx(0.0036 * 1.02)
    for _ in range(60):
        wait.observe_round(0.010)
    assert wait.sleep_s(0.0) == pytest.approx(0.009)


def test_a_launch_leaves_the_host_its_time_and_more() -> None:
    wait = RoundWait()
    assert wait.until_launch_s(0.0) == 0.0
    wait.observe_round(0.010)
    wait.observe_launch(0.002)
    assert wait.until_launch_s(0.0) == pytest.approx(0.009 - 0.001 - 0.003)
    assert wait.until_launch_s(0.004) == pytest.approx(0.001)
    assert wait.until_launch_s(0.006) == 0.0
    wait.observe_launch(0.020)
    assert wait.until_launch_s(0.0) == 0.0
    for _ in range(200):
        wait.observe_launch(0.001)
    assert wait.until_launch_s(0.0) == pytest.approx(0.009 - 0.001 - 0.0015)


def test_a_round_behind_a_planned_step_waits_for_that() -> None:
    wait = RoundWait()
    wait.observe_round(0.010)
    wait.observe_launch(0.001)
    assert wait.until_launch_s(0.0, num_rows=600) == 0.0
    wait.observe_planned(600, 0.020)
    wait.observe_planned(100, 0.012)
    assert wait.until_launch_s(0.0, num_rows=512) == pytest.approx(0.018 - 0.001 - 0.0015)
    assert wait.until_launch_s(0.010, num_rows=512) == pytest.approx(0.0055)
    assert wait.until_launch_s(0.0) == pytest.approx(0.009 - 0.001 - 0.0015)


def test_what_the_host_came_too_late_for_has_no_time() -> None:
    times = DeviceTimes()
    # Launched when the device had nothing to do.
    assert times.read(1.0, 1.5, is_awaited=True) == 0.5
    # Behind that.
    assert times.read(1.2, 2.25, is_awaited=True) == 0.75
    # Done when the host came: neither its end is known nor the next one's begin.
    assert times.read(2.0, 4.0, is_awaited=False) is None
    assert times.read(3.0, 4.5, is_awaited=True) is None
    assert times.read(4.2, 5.0, is_awaited=True) == 0.5
    assert times.began_s(4.8) == 5.0
    assert times.began_s(6.0) == 6.0
