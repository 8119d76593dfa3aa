"""The host polls for the end of a round, and launches the next one, shortly before that end."""

from __future__ import annotations

import numpy as np
import pytest

from services.target.rounds.round_steps import (
    POLL_S,
    DeviceTime,
    DeviceTimes,
    HostTime,
    RoundWait,
)


def test_nothing_known_is_looked_at_all_the_time() -> None:
    assert RoundWait().sleep_s(0.0) == POLL_S


def test_most_of_a_round_is_slept_through() -> None:
    wait = RoundWait()
    wait.observe_round(DeviceTime(0.010))
    assert wait.sleep_s(0.001) == pytest.approx(0.008)
    assert wait.sleep_s(0.0088) == pytest.approx(0.0002)
    assert wait.sleep_s(0.009) == POLL_S
    assert wait.sleep_s(5.0) == POLL_S


def test_a_quicker_round_counts_at_once_and_slower_ones_by_and_by() -> None:
    wait = RoundWait()
    wait.observe_round(DeviceTime(0.010))
    wait.observe_round(DeviceTime(0.004))
    assert wait.sleep_s(0.0) == pytest.approx(0.0036)
    wait.observe_round(DeviceTime(0.010))
    assert wait.sleep_s(0.0) == pytest.approx(0.0036 * 1.02)
    for _ in range(60):
        wait.observe_round(DeviceTime(0.010))
    assert wait.sleep_s(0.0) == pytest.approx(0.009)


def test_a_launch_leaves_the_host_as_much_time_as_it_mostly_takes() -> None:
    wait = RoundWait()
    assert wait.until_launch_s(0.0) == 0.0
    wait.observe_round(DeviceTime(0.010))
    for _ in range(100):
        wait.observe_launch(0.002)
    assert wait.until_launch_s(0.0) == pytest.approx(0.0075, rel=1e-3)
    assert wait.until_launch_s(0.004) == pytest.approx(0.0035, rel=1e-3)
    assert wait.until_launch_s(0.008) == 0.0
    wait.observe_launch(0.020)
    assert wait.until_launch_s(0.0) == 0.0
    for _ in range(100):
        wait.observe_launch(0.001)
    assert wait.until_launch_s(0.0) == pytest.approx(0.0085, rel=1e-3)


def test_requests_that_arrive_need_time_to_be_admitted() -> None:
    wait = RoundWait()
    wait.observe_round(DeviceTime(0.010))
    for _ in range(100):
        wait.observe_planning(0.003, is_admitting=True)
    assert wait.until_launch_s(0.0) == pytest.approx(0.0095)
    assert wait.until_launch_s(0.0, is_admitting=True) == pytest.approx(0.0065, rel=1e-3)


def test_most_times_of_the_host_are_below_the_estimate() -> None:
    host, times = HostTime(), np.random.default_rng(0).gamma(4.0, 5e-4, 1_000)
    num_below = 0
    for seconds in times:
        num_below += seconds <= host.most_s
        host.observe(float(seconds))
    assert 0.85 < num_below / len(times) < 0.98


def test_a_round_behind_a_planned_step_waits_for_that() -> None:
    wait = RoundWait()
    wait.observe_round(DeviceTime(0.010))
    assert wait.until_launch_s(0.0, num_rows=600) == 0.0
    wait.observe_planned(600, DeviceTime(0.020))
    wait.observe_planned(100, DeviceTime(0.012))
    assert wait.until_launch_s(0.0, num_rows=512) == pytest.approx(0.0195)
    assert wait.until_launch_s(0.010, num_rows=512) == pytest.approx(0.0095)
    assert wait.until_launch_s(0.0) == pytest.approx(0.0095)


def test_work_that_the_host_came_too_late_for_took_less_time() -> None:
    times = DeviceTimes()
    # Launched when the device had nothing to do.
    assert times.read(1.0, 1.5, is_awaited=True) == DeviceTime(0.5)
    # Behind that.
    assert times.read(1.2, 2.25, is_awaited=True) == DeviceTime(0.75)
    # Done when the host came: neither its end is known nor the next one's begin.
    assert times.read(2.0, 4.0, is_awaited=False) == DeviceTime(2.0, is_exact=False)
    assert times.read(3.0, 4.5, is_awaited=True) == DeviceTime(1.5, is_exact=False)
    assert times.read(4.25, 5.0, is_awaited=True) == DeviceTime(0.5)
    assert times.began_s(4.8) == 5.0
    assert times.began_s(6.0) == 6.0


def _mean_round_s(wait: RoundWait, device_s: float, num_rounds: int) -> float:
    """Returns the mean time between launches, with rounds of `device_s` seconds on the device and
    a host that takes 0.1 ms for a launch."""
    times, host_s = DeviceTimes(), 1e-4
    launched_s, ends_s = [0.0], [device_s]
    for _ in range(num_rounds):
        began_s = times.began_s(launched_s[-1])
        launch_s = began_s + wait.until_launch_s(0.0)
        now_s = launch_s + host_s
        wait.observe_launch(host_s)
        # The round before is read behind the launch.
        read_s = max(now_s, ends_s[-1])
        took = times.read(launched_s[-1], read_s, is_awaited=now_s < ends_s[-1])
        wait.observe_round(took)
        ends_s.append(max(ends_s[-1], now_s) + device_s)
        launched_s.append(launch_s)
    return (launched_s[-1] - launched_s[num_rounds // 2]) / (num_rounds - num_rounds // 2)


def test_rounds_that_become_shorter_do_not_wait_as_long_as_before() -> None:
    wait = RoundWait()
    assert _mean_round_s(wait, 0.016, 50) == pytest.approx(0.016, rel=0.01)
    assert _mean_round_s(wait, 0.005, 50) == pytest.approx(0.005, rel=0.01)
    assert _mean_round_s(wait, 0.016, 200) == pytest.approx(0.016, rel=0.01)
