"""A log line for each part of a start."""

from __future__ import annotations

import logging
import sys

import pytest

from shared.telemetry.start_up import log_process_age, process_age_s, start_phase


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.INFO, "shared.telemetry.start_up")
    return caplog


def _facts(lines: pytest.LogCaptureFixture, name: str) -> list[object]:
    return [vars(record).get(name) for record in lines.records]


def test_a_phase_says_how_long_it_took(lines: pytest.LogCaptureFixture) -> None:
    times = iter((10.0, 12.5))
    with start_phase("weights", clock=lambda: next(times)) as phase:
        phase.size_bytes = 5_000_000_000
    assert _facts(lines, "phase") == ["weights"]
    assert _facts(lines, "seconds") == [2.5]
    assert _facts(lines, "gb_per_s") == [2.0]


def test_a_phase_within_another_is_named_after_both(lines: pytest.LogCaptureFixture) -> None:
    with start_phase("draft"):
        with start_phase("weights"):
            pass
        with start_phase("warm-up"):
            pass
    with start_phase("serving"):
        pass
    assert _facts(lines, "phase") == ["draft/weights", "draft/warm-up", "draft", "serving"]
    assert _facts(lines, "size_bytes") == [None] * 4


def test_a_phase_that_fails_is_not_reported(lines: pytest.LogCaptureFixture) -> None:
    with pytest.raises(ValueError, match="no weights"), start_phase("weights"):
        raise ValueError("no weights")
    with start_phase("servers"):
        pass
    assert _facts(lines, "phase") == ["servers"]


@pytest.mark.skipif(sys.platform != "linux", reason="read from /proc")
def test_the_age_of_the_process_is_that_since_its_start(lines: pytest.LogCaptureFixture) -> None:
    age_s = process_age_s()
    assert age_s is not None
    assert age_s > 0.0
    log_process_age("imports")
    [seconds] = _facts(lines, "seconds")
    assert isinstance(seconds, float)
    assert seconds >= round(age_s, 3)
