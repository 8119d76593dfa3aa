"""Cases whose speed can be worked out by hand."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from tests.bench.scenario_file import BadScenario, read_scenarios, scenario_of
from tests.bench.simulate import main
from tests.bench.simulated_split import Curve, Scenario, predict

# A step takes 10 ms whatever its rows, a draft forward 1 ms, the second level is accepted half as
# often as the first: 1 + 0.8 + 0.8 × 0.5 = 2.2 tokens a round of two steps.
BASE = Scenario(
    verify_ms=Curve(((1, 10.0),)),
    draft_step_ms=Curve(((1, 1.0),)),
    acceptance=(0.8, 0.5),
    hop_ms=1.0,
    num_steps=(2,),
)


def test_plain_decoding_is_one_token_a_step() -> None:
    prediction = predict(replace(BASE, num_steps=(0,), batch=3))
    assert prediction.tokens_per_s == pytest.approx(300.0)
    assert prediction.wait_ms == 0.0


def test_a_synchronous_round_is_verification_drafting_and_a_hop() -> None:
    prediction = predict(BASE)
    assert prediction.round_ms == pytest.approx(10.0 + 2.0 + 1.0)
    assert prediction.round_tokens == pytest.approx(2.2)
    assert prediction.tokens_per_s == pytest.approx(1000 * 2.2 / 13)


def test_what_is_foreseen_waits_for_nothing() -> None:
    ahead = replace(BASE, is_asynchronous=True, hit_rate=1.0)
    assert predict(ahead).tokens_per_s == pytest.approx(220.0)
    half = replace(ahead, hit_rate=0.5)
    # A miss waits for a hop and three forwards.
    assert predict(half).round_ms == pytest.approx(10.0 + 0.5 * 4.0)


def test_where_a_miss_is_a_plain_step_it_costs_its_tokens_and_no_wait() -> None:
    ahead = replace(BASE, is_asynchronous=True, is_plain_on_miss=True, hit_rate=0.5)
    prediction = predict(ahead)
    assert prediction.wait_ms == 0.0
    assert prediction.round_tokens == pytest.approx(0.5 * 2.2 + 0.5)
    assert predict(replace(ahead, is_asynchronous=False)).round_tokens == pytest.approx(2.2)


@pytest.mark.parametrize(
    ("file", "missed"),
    [
        ("measured_h200.json", []),
        (
            "measured_h100.json",
            ["8B, EAGLE-3, batch 256", *(f"8B, EAGLE-3 remote, batch {b}" for b in (8, 256))],
        ),
    ],
)
def test_all_rows_but_those_that_are_named_are_within_a_tenth(file: str, missed: list[str]) -> None:
    """Of docs/benchmarks.md."""
    measured = read_scenarios(Path(__file__).with_name(file)).measured
    errors = {
        each.name: predict(each.scenario).tokens_per_s / each.tokens_per_s for each in measured
    }
    assert len(errors) > 25
    assert [name for name, ratio in errors.items() if abs(ratio - 1) > 0.1] == missed


def test_the_best_depth_is_chosen() -> None:
    prediction = predict(replace(BASE, num_steps=(0, 1, 2)))
    assert prediction.num_steps == 2
    hopeless = replace(BASE, num_steps=(0, 1, 2), acceptance=(0.1,))
    assert predict(hopeless).num_steps == 0


def test_every_sequence_has_keys_and_values_whatever_its_rows() -> None:
    long = replace(BASE, batch=8, context_ms=0.5)
    assert predict(long).verify_ms == pytest.approx(10.0 + 8 * 0.5)
    assert predict(replace(long, tensor_parallel=2)).verify_ms == pytest.approx(5.0 + 8 * 0.25)


def test_a_new_request_waits_for_rounds_and_its_prompt_while_others_go_on() -> None:
    plain = replace(BASE, num_steps=(0,), answer_tokens=100, request_ms=4.0, prompt_ms=6.0)
    alone = predict(plain)
    assert alone.first_token_ms == pytest.approx(10.0)
    assert alone.tokens_per_s == pytest.approx(1000 * 100 / (100 * 10.0 + 10.0))
    assert predict(replace(plain, batch=2)).first_token_ms == pytest.approx(10.0 + 15.0)


def test_steps_that_read_prompts_come_between_the_rounds_of_others() -> None:
    many = replace(BASE, answer_tokens=22, prompt_ms=6.0)
    # An answer takes ten rounds.
    assert predict(many).prompts_ms == 0.0
    share = 1.0 - math.exp(-10 / 10)
    assert predict(replace(many, batch=11)).prompts_ms == pytest.approx(6.0 * share)


def test_a_draft_slower_than_its_target_holds_it_up_even_on_hits() -> None:
    slow = replace(BASE, draft_step_ms=Curve(((1, 7.0),)), is_asynchronous=True, hit_rate=1.0)
    assert predict(slow).round_ms == pytest.approx(3 * 7.0 + 1.0)


def test_a_wire_is_hidden_while_tree_and_hop_are_shorter_than_a_verification() -> None:
    ahead = replace(BASE, is_asynchronous=True, hit_rate=1.0)
    assert predict(replace(ahead, hop_ms=7.0)).wait_ms == 0.0
    assert predict(replace(ahead, hop_ms=11.0)).wait_ms == pytest.approx(4.0)


def test_a_draft_ahead_has_a_row_for_each_depth_of_a_verdict() -> None:
    by_rows = Curve(((1, 1.0), (101, 11.0)))
    ahead = replace(BASE, draft_step_ms=by_rows, is_asynchronous=True, batch=4)
    assert predict(ahead).draft_ms == pytest.approx(3 * (1.0 + 0.1 * 11))


def test_a_pool_shares_the_sequences() -> None:
    per_sequence = Curve(((1, 1.0), (8, 8.0)))
    alone = replace(BASE, draft_step_ms=per_sequence, batch=8)
    assert predict(alone).draft_ms == pytest.approx(16.0)
    assert predict(replace(alone, num_drafts=4)).draft_ms == pytest.approx(4.0)
    assert predict(replace(alone, num_drafts=3)).draft_ms == pytest.approx(6.0)


def test_devices_split_a_step_and_pay_for_each_doubling() -> None:
    four = replace(BASE, num_steps=(0,), tensor_parallel=4, all_reduce_ms=0.5, host_ms=0.2)
    assert predict(four).verify_ms == pytest.approx(10.0 / 4 + 2 * 0.5 + 0.2)
    rows = replace(four, batch=8, exchange_row_ms=0.01)
    assert predict(rows).verify_ms == pytest.approx(10.0 / 4 + 2 * 0.5 + 0.2 + 8 * 3 * 0.01)


def test_rows_of_all_sequences_and_levels_are_verified() -> None:
    by_rows = replace(BASE, verify_ms=Curve(((1, 10.0), (101, 110.0))), batch=5, nodes_per_step=3)
    assert predict(by_rows).verify_ms == pytest.approx(10.0 + 34)


def test_curves_are_flat_outside_what_is_known() -> None:
    curve = Curve(((4, 10.0), (8, 14.0)))
    assert [curve(at) for at in (1, 4, 6, 8, 90)] == [10.0, 10.0, 12.0, 14.0, 14.0]


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"hit_rate": 1.5}, r"hit_rate is 1.5; it must be a number in \[0, 1\]"),
        ({"batch": 0}, "batch is 0"),
        ({"batch": 1.5}, "a whole number"),
        ({"num_steps": [1, 33]}, r"num_steps is \[1, 33\]; it must be a whole number in \[0, 32\]"),
        ({"acceptance": []}, r"acceptance is \[\]"),
        ({"acceptance": [2]}, r"acceptance is \[2\]"),
        ({"verify_ms": {}}, "verify_ms is {}"),
        ({"verify_ms": {"a": 1}}, "keys must be whole numbers"),
        ({"verify_ms": {"1": "x"}}, "its keys must be whole numbers, its times numbers"),
        ({"verify_ms": {"1": -1}}, "verify_ms holds -1; times must be above 0"),
        ({"verify_ms": {"1": 0}}, "verify_ms holds 0; times must be above 0"),
        ({"verify_ms": {"1": float("nan")}}, "verify_ms holds nan"),
        ({"draft_step_ms": {"1": -1}}, "draft_step_ms holds -1; times must be at least 0"),
        ({"speed": 1}, "speed is unknown"),
        ({"is_asynchronous": "no"}, "is_asynchronous is 'no'; it must be true or false"),
    ],
)
def test_a_bad_scenario_is_refused_by_key(change: dict[str, object], problem: str) -> None:
    good: dict[str, object] = {"verify_ms": {"1": 10.0}}
    assert scenario_of(good).batch == 1
    with pytest.raises(BadScenario, match=problem):
        scenario_of(good | change)


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ({"scenarios": [3]}, "scenario 1 is 3; it must be an object"),
        ({"base": [], "scenarios": []}, r"base is \[\]; it must be an object"),
        ({"scenarios": [{"name": "a", "parts": ["b"]}]}, "a: there is no part 'b'"),
        ({"scenarios": [{"name": "a", "measured_tokens_per_s": 0}]}, "a: measured_tokens_per_s"),
    ],
)
def test_a_bad_file_is_refused_by_scenario(tmp_path: Path, content: object, problem: str) -> None:
    file = tmp_path / "bad.json"
    file.write_text(json.dumps(content))
    with pytest.raises(BadScenario, match=problem):
        read_scenarios(file)


def test_parts_and_speeds_by_batch_become_scenarios(tmp_path: Path) -> None:
    file = tmp_path / "parts.json"
    content = {
        "base": {"verify_ms": {"1": 5.0}, "num_steps": 1},
        "parts": {"slow": {"verify_ms": {"1": 9.0}, "num_steps": [2, 3]}},
        "scenarios": [
            {"name": "a", "measured_tokens_per_s": 7},
            {
                "name": "b",
                "parts": ["slow"],
                "num_steps": 4,
                "hop_ms": {"1": 3, "8": 4},
                "measured_tokens_per_s": {"1": 70, "8": 80},
            },
        ],
    }
    file.write_text(json.dumps(content))
    first, alone, many = read_scenarios(file).measured
    assert (first.scenario.num_steps, first.scenario.verify_ms(1)) == ((1,), 5.0)
    assert (alone.name, many.name) == ("b, batch 1", "b, batch 8")
    assert (many.scenario.batch, many.scenario.hop_ms, many.tokens_per_s) == (8, 4.0, 80.0)
    assert (alone.scenario.num_steps, alone.scenario.verify_ms(1)) == ((4,), 9.0)


def test_the_check_passes_what_was_measured_and_fails_what_was_not(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    measured = Path(__file__).with_name("measured_demo.json")
    assert main(["--check", str(measured), "--tolerance", "0.1"]) == 0
    assert "demo on a CPU, plain" in capsys.readouterr().out
    content = json.loads(measured.read_text())
    content["scenarios"][1]["measured_tokens_per_s"] = 200.0
    wrong = tmp_path / "wrong.json"
    wrong.write_text(json.dumps(content))
    assert main(["--check", str(wrong), "--tolerance", "0.1"]) == 1


def test_the_scenarios_beside_the_program_can_be_read(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    assert "70B" in capsys.readouterr().out


def test_a_missing_file_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path / "none.json")]) == 1
    assert "none.json" in capsys.readouterr().err
