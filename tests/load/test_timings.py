"""Figures of load tests, from times that are known."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest

from tests.load.arrivals import Bursts, Poisson, Steady, arrivals_named
from tests.load.sweep import Elapsed, closed_loop, open_loop
from tests.load.synthetic_target import age_us, spelled_time
from tests.load.timings import Objective, Point, Timing, knee, write_raw


def _timing(due_s: float, *token_s: float) -> Timing:
    return Timing(due_s, list(token_s), [1] * len(token_s))


def test_a_messages_tokens_share_the_gap_before_it() -> None:
    timing = Timing(1.0, [1.5, 1.8, 1.9], [1, 3, 1])
    assert timing.first_s == 0.5
    assert [round(gap, 9) for gap in timing.gaps_s] == [0.1, 0.1, 0.1, 0.1]


def test_goodput_counts_requests_that_keep_both_objectives() -> None:
    objective = Objective(first_s=0.5, gap_s=0.1)
    kept, late, slow = _timing(0, 0.5, 0.6), _timing(0, 0.6, 0.7), _timing(0, 0.1, 0.3)
    failed = Timing(0.0, error="UNAVAILABLE")
    summary = Point(4, (kept, late, slow, failed), 2.0).summary(objective)
    assert (summary["requests"], summary["errors"]) == (4, 1)
    assert (summary["requests_per_s"], summary["goodput_per_s"]) == (1.5, 0.5)
    assert summary["tokens_per_s"] == 3.0
    assert summary["ttft_ms_p99"] == 600.0


def test_the_knee_is_where_more_load_only_waits() -> None:
    # A server of one place: beyond one in flight, requests a second stay and times grow.
    points = [
        Point(load, tuple(_timing(0, float(load)) for _ in range(10)), 10.0) for load in (1, 2, 4)
    ]
    assert knee(points).load == 1
    # A server of many places: requests a second grow with the load until the third point.
    scaling = [
        Point(load, tuple(_timing(0, time_s) for _ in range(10)), duration_s)
        for load, time_s, duration_s in ((1, 1.0, 10.0), (4, 1.1, 2.75), (8, 4.0, 2.7))
    ]
    assert knee(scaling).load == 4


def test_raw_times_are_kept_a_line_a_request(tmp_path: Path) -> None:
    path = tmp_path / "new" / "raw.jsonl"
    write_raw(path, [Point(2, (_timing(0.5, 1.0, 1.25), Timing(1.0, error="no")), 2.0)])
    first, second = map(json.loads, path.read_text().splitlines())
    assert first == {
        "load": 2,
        "due_s": 0.5,
        "token_s": [1.0, 1.25],
        "num_tokens": [1, 1],
        "error": None,
    }
    assert second["error"] == "no"


@pytest.mark.parametrize("name", ["poisson", "burst", "steady"])
def test_every_pattern_keeps_its_rate(name: str) -> None:
    offsets = list(itertools.islice(arrivals_named(name, 50.0).offsets_s(), 5000))
    assert offsets == sorted(offsets)
    assert 5000 / offsets[-1] == pytest.approx(50.0, rel=0.05)


def test_patterns_differ_in_how_they_spread() -> None:
    poisson = list(itertools.islice(Poisson(10.0).offsets_s(), 4000))
    gaps = [b - a for a, b in itertools.pairwise(poisson)]
    mean = sum(gaps) / len(gaps)
    variance = sum((gap - mean) ** 2 for gap in gaps) / len(gaps)
    assert variance == pytest.approx(mean**2, rel=0.15), "exponential gaps"
    assert list(itertools.islice(Bursts(10.0, 2).offsets_s(), 4)) == [0.0, 0.0, 0.2, 0.2]
    assert list(itertools.islice(Steady(4.0).offsets_s(), 3)) == [0.0, 0.25, 0.5]


def test_an_unknown_pattern_is_refused() -> None:
    with pytest.raises(ValueError, match="'uniform'; there is poisson"):
        arrivals_named("uniform", 1.0)


async def test_a_closed_loop_keeps_so_many_open() -> None:
    num_open, most = 0, 0

    async def send(number: int, timing: Timing, elapsed: Elapsed) -> None:
        nonlocal num_open, most
        num_open += 1
        most = max(most, num_open)
        timing.token_s.append(elapsed())
        timing.num_tokens.append(1)
        num_open -= 1

    point = await closed_loop(send, num_in_flight=3, num_requests=10)
    assert len(point.timings) == 10
    assert most <= 3


async def test_an_open_loop_is_timed_from_when_a_request_was_due() -> None:
    async def send(number: int, timing: Timing, elapsed: Elapsed) -> None:
        timing.token_s.append(elapsed())
        timing.num_tokens.append(1)

    point = await open_loop(send, Steady(1000.0), load=1000.0, num_requests=5)
    assert [timing.due_s for timing in point.timings] == [0.0, 0.001, 0.002, 0.003, 0.004]
    assert all(timing.first_s >= 0.0 for timing in point.timings)


@pytest.mark.parametrize("vocab_size", [300, 8192])
def test_tokens_spell_the_time_they_were_sent(vocab_size: int) -> None:
    for sent_us in (5, vocab_size**3 - 1, vocab_size**3 + 7):
        token_ids = [1, 2, *spelled_time(sent_us, vocab_size)]
        assert all(0 <= token_id < vocab_size for token_id in token_ids)
        assert age_us(token_ids, sent_us + 1234, vocab_size) == 1234
