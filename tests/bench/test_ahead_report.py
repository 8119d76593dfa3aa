"""Figures of passes whose answers and counters are made up."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from shared.tokens import TreeShape
from tests.bench import ahead_report, delays, simulate, simulator_check
from tests.bench.ahead_report import Compared
from tests.bench.passes import CHOSEN, PLAIN, Case, Load, Mode, Pass
from tests.bench.scenario_file import read_scenarios, write_scenarios
from tests.bench.scrape import Lookahead, add_counters
from tests.bench.session import Answer
from tests.helpers.series import every_series

CHAIN = TreeShape(3, 1, 4)
SYNCHRONOUS, AHEAD = Mode(CHAIN), Mode(CHAIN, 8)
PAGE = """
# HELP outrider_target_steps_total Engine steps.
outrider_target_steps_total 4.0
outrider_target_busy_seconds_total 0.02
outrider_target_host_gap_seconds_total 0.004
outrider_target_hit_gap_seconds_sum 0.0009
outrider_target_hit_gap_seconds_count 3.0
outrider_target_lookahead_hits_total{position="3",rank="0"} 2.0
outrider_target_lookahead_hits_total{position="1",rank="1"} 1.0
outrider_target_lookahead_misses_total{position="1"} 1.0
outrider_target_wire_bytes_total{direction="sent"} 40.0
outrider_target_wire_bytes_total{direction="received"} 80.0
outrider_draft_batch_seconds_bucket{le="0.01"} 4.0
outrider_draft_batch_seconds_sum 0.006
outrider_draft_ahead_seconds_total 0.012
outrider_draft_ahead_steps_total 6.0
process_cpu_seconds_total 9.0
"""


def _counters() -> dict[str, float]:
    totals: dict[str, float] = {}
    add_counters(totals, PAGE)
    return totals


def _pass(num_rounds: int, duration_s: float, *last_tokens: int) -> Pass:
    answers = tuple(Answer((1, 2, 3, 4, 5, 6, 7, last), num_rounds) for last in last_tokens)
    return Pass(answers, duration_s, _counters())


def _compared() -> Compared:
    """Two repeats; in the second, the answer that was drafted ahead is another."""
    return Compared(
        Case(0.0, 1),
        (PLAIN, SYNCHRONOUS, AHEAD),
        [
            [_pass(8, 0.08, 8), _pass(4, 0.05, 8), _pass(4, 0.04, 8)],
            [_pass(8, 0.10, 8), _pass(4, 0.05, 8), _pass(4, 0.02, 9)],
        ],
    )


def _cells(text: str, line: int) -> list[str]:
    return text.splitlines()[line].split()


def test_every_series_that_the_benches_read_exists() -> None:
    """A name that is gone reads as 0, which looks like a figure."""
    texts = [file.read_text() for file in Path(__file__).parent.glob("*.py")]
    read = set(
        re.findall(r"\boutrider_(?:target|draft)_[a-z_]+_(?:total|sum|count)", "".join(texts))
    )
    assert len(read) > 10
    assert read - every_series() == set()


def test_counters_are_summed_over_labels() -> None:
    totals = _counters()
    assert totals["outrider_target_lookahead_hits_total"] == 3.0
    assert totals['outrider_target_wire_bytes_total{direction="sent"}'] == 40.0
    assert "process_cpu_seconds_total" not in totals


def test_hits_are_read_by_position_and_rank() -> None:
    found = Lookahead.of(
        _counters() | {'outrider_target_lookahead_misses_total{position="8+"}': 2.0}
    )
    assert found.hits == {("3", "0"): 2, ("1", "1"): 1}
    assert found.positions == ["1", "3", "8+"]
    assert found.ranks == ["0", "1"]


def test_a_row_says_speed_hits_gap_bytes_and_equal_answers() -> None:
    text = ahead_report.speeds(_compared())
    assert text.splitlines()[0] == "temperature 0, 1 at a time"
    assert _cells(text, 2) == [
        *("plain", "90.0", "1.00", "80.0", "100.0", "1.00"),
        *("-", "-", "-", "300", "-", "-", "1/1"),
    ]
    assert _cells(text, 4) == [
        *("3,1,4,", "8", "ahead", "300.0", "3.33", "200.0", "400.0", "2.00"),
        *("75%", "0%", "25%", "300", "10", "20", "0/1;", "0,", "token", "7:", "9/8"),
    ]
    assert text.endswith(
        "best synchronous split: 1.78 times plain; best ahead: 3.33 times plain, "
        "1.88 times that split"
    )


def test_the_account_is_by_step() -> None:
    text = ahead_report.account(_compared())
    # The pass of 40 ms is the median.
    figures = ["10.00", "5.00", "1.00", "1.50", "3.00", "45%", "1.5"]
    assert _cells(text, 3)[3:] == figures


def test_labels_that_only_a_later_pass_has_are_counted() -> None:
    early = Pass((Answer((1,), 1),), 1.0, {})
    compared = Compared(Case(0.0, 1), (AHEAD,), [[early], [_pass(4, 0.04, 8)]])
    assert ahead_report.foreseen(compared, AHEAD) == ahead_report.foreseen(_compared(), AHEAD)


def test_positions_have_their_ranks_and_misses() -> None:
    lines = ahead_report.foreseen(_compared(), AHEAD).splitlines()
    assert lines[2].split() == ["1", "50.0%", "0.0%", "50.0%", "50.0%"]
    assert lines[3].split() == ["3", "50.0%", "100.0%", "0.0%", "0.0%"]


def test_loss_is_against_no_wire_and_against_one_without_length() -> None:
    direct = _compared()
    modes = (SYNCHRONOUS, AHEAD)
    delayed = {
        delay_ms: Compared(direct.case, modes, [[_pass(4, 0.05, 8), _pass(4, duration_s, 8)]])
        for delay_ms, duration_s in ((0.0, 0.032), (1.0, 0.04))
    }
    lines = delays.report(direct, delayed).splitlines()
    assert lines[6].split()[-10:-6] == ["250.0", "2.78", "16.7%", "0.0%"]
    assert lines[7].split()[-10:-6] == ["200.0", "2.22", "33.3%", "20.0%"]


@pytest.mark.parametrize(
    ("alone", "said"),
    [
        ((0, 0, 4), "left alone from 30 ms each way on"),
        ((0, 3, 4), "left alone from 2 ms each way on"),
        # Of a wire in between that is longer it is not.
        ((4, 0, 4), "left alone from 30 ms each way on"),
        ((4, 4, 2), "in force at 30 ms each way"),
    ],
)
def test_it_is_said_from_which_delay_on_speculation_is_left_alone(
    alone: tuple[int, ...], said: str
) -> None:
    answer = Answer((8,), 4)
    direct = Compared(Case(0.0, 1), (PLAIN, CHOSEN), [[_pass(8, 0.08, 8), _pass(4, 0.04, 8)]])
    delayed = {
        delay_ms: Compared(
            direct.case,
            (CHOSEN,),
            [[Pass((answer,), 1.0, {"outrider_target_paused_rounds_total": float(number)})]],
        )
        for delay_ms, number in zip((0.0, 2.0, 30.0), alone, strict=True)
    }
    assert delays.report(direct, delayed).endswith(said)


def test_levels_accept_what_gives_the_tokens_of_a_round() -> None:
    assert simulator_check.level_acceptance(2, 1.75) == pytest.approx(0.5)
    assert simulator_check.level_acceptance(3, 4.0) == pytest.approx(1.0)


def test_the_simulator_adds_up_times_of_the_synchronous_pass() -> None:
    plain, synchronous, ahead = simulator_check.points(_compared(), hop_ms=0.5)
    assert plain.predicted == pytest.approx(1000 / 5.0)
    # 5 ms of verification, 1.5 ms of drafting, a hop, 2 tokens.
    assert synchronous.predicted == pytest.approx(1000 * 2 / 7.0, rel=1e-6)
    # One and a half steps of 2 ms for each of the target's, and a hop, are less than a
    # verification, so hits wait for nothing. A quarter waits for both.
    round_ms = 5.0 + 0.25 * 3.5
    assert ahead.predicted == pytest.approx(1000 * 2 / round_ms, rel=1e-6)
    assert simulator_check.report([plain]).splitlines()[1].split() == [
        *("plain", "80.0", "200.0", "+150.0", "%", "5.00", "0.00")
    ]


def test_what_the_simulator_was_told_can_be_checked_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    points = simulator_check.points(_compared(), hop_ms=0.5)
    file = tmp_path / "run.json"
    write_scenarios(file, simulator_check.measured(points, Case(0.0, 1)))
    again = read_scenarios(file).measured
    assert [each.scenario for each in again] == [point.scenario for point in points]
    assert [each.tokens_per_s for each in again] == [point.measured for point in points]
    assert again[0].name == "plain; temperature 0, 1 at a time"
    assert simulate.main(["--check", str(file)]) == 1
    assert "+150.0 %" in capsys.readouterr().out


def test_a_pass_has_as_many_prompts_as_are_asked_at_a_time() -> None:
    load = Load([[1]] * 9, num_prompts=2, num_tokens=4)
    assert len(load.of(Case(0.0, 1))) == 2
    assert len(load.of(Case(0.0, 8))) == 8
