"""What windows of plain decoding and of speculation say of the gain."""

from __future__ import annotations

import random

import pytest

from services.target.control.gain_estimate import GainEstimate


def _observe(
    estimate: GainEstimate, gain: float, num_windows: int, seed: int = 0, level: float = 1.0
) -> None:
    """Shows windows of both in turn."""
    source = random.Random(seed)
    for window in range(num_windows):
        is_speculative = window % 2 == 1
        noise = source.gauss(0.0, 0.2 if is_speculative else 0.03)
        speed = level * (1.0 + (gain if is_speculative else 0.0)) + noise
        estimate.observe(speed, is_speculative=is_speculative)


def test_nothing_is_beyond_doubt_before_windows_of_both() -> None:
    estimate = GainEstimate.of(num_sequences=1)
    assert estimate.lowest < 0.0 < estimate.highest
    for _ in range(20):
        estimate.observe(1.0, is_speculative=False)
    assert estimate.lowest < 0.0 < estimate.highest


@pytest.mark.parametrize("gain", [-0.4, -0.1, 0.15, 1.2])
def test_the_gain_is_found_and_its_sign_is_beyond_doubt(gain: float) -> None:
    estimate = GainEstimate.of(num_sequences=1)
    _observe(estimate, gain, 200)
    assert estimate.gain == pytest.approx(gain, abs=0.08)
    assert estimate.lowest > 0.0 if gain > 0.0 else estimate.highest < 0.0


def test_no_gain_is_seldom_taken_for_one() -> None:
    """Negative control of the confidence: of many runs about 5 % are above by chance."""
    num_above = 0
    for seed in range(200):
        estimate = GainEstimate.of(num_sequences=1)
        _observe(estimate, 0.0, 100, seed)
        num_above += estimate.lowest > 0.0
    assert num_above <= 20


def test_a_machine_that_slows_down_is_not_a_loss() -> None:
    estimate = GainEstimate.of(num_sequences=4)
    _observe(estimate, 0.3, 100)
    for window in range(100):
        _observe(estimate, 0.3, 2, seed=window, level=1.0 - 0.003 * window)
    assert estimate.level == pytest.approx(0.7, abs=0.08)
    assert estimate.lowest > 0.0


def test_one_stall_changes_nothing_and_a_change_is_followed() -> None:
    estimate = GainEstimate.of(num_sequences=4)
    _observe(estimate, 0.8, 60)
    before = estimate.gain
    estimate.observe(0.1, is_speculative=True)
    assert estimate.is_surprised
    assert estimate.gain == before
    _observe(estimate, 0.8, 2)
    assert estimate.gain == pytest.approx(before, abs=0.05)
    _observe(estimate, -0.4, 40)
    assert estimate.highest < 0.0


def test_what_is_not_observed_gets_uncertain() -> None:
    estimate = GainEstimate.of(num_sequences=4)
    _observe(estimate, 0.1, 200)
    before = estimate.deviation
    for _ in range(400):
        estimate.observe(1.0, is_speculative=False)
    assert estimate.deviation > 1.2 * before


def test_a_similar_regime_begins_with_the_same_gain_and_more_doubt() -> None:
    known = GainEstimate.of(num_sequences=4)
    _observe(known, 0.5, 100)
    similar = GainEstimate.of(num_sequences=8, like=known, deviation=0.3)
    assert similar.gain == known.gain
    assert similar.deviation > known.deviation
