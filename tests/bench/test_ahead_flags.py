"""Flags of the bench become cases, modes and processes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from shared.models.config import ModelConfig
from tests.bench.ahead_flags import cases_of, modes_of, parse, settings_of
from tests.bench.chat_prompts import questions


def test_temperatures_and_requests_at_a_time_are_crossed() -> None:
    flags = parse(["--temperatures", "0", "1", "--concurrency", "1", "8"], None)
    assert [case.name for case in cases_of(flags)] == [
        "temperature 0, 1 at a time",
        "temperature 0, 8 at a time",
        "temperature 1, 1 at a time",
        "temperature 1, 8 at a time",
    ]


def test_every_shape_is_tried_with_every_budget() -> None:
    flags = parse(["--shapes", "3,1,4", "4,4,12", "--budgets", "2", "8"], None)
    assert [mode.name for mode in modes_of(flags)] == [
        *("plain", "3,1,4, synchronous", "4,4,12, synchronous"),
        *("3,1,4, 2 ahead", "3,1,4, 8 ahead", "4,4,12, 2 ahead", "4,4,12, 8 ahead"),
    ]


def test_what_the_target_chooses_is_compared_with_plain_decoding_alone(tmp_path: Path) -> None:
    flags = parse(["--adaptive", "--delay-ms", "0.5", "30"], None)
    assert [mode.name for mode in modes_of(flags)] == ["plain", "as chosen"]
    assert flags.delay_ms == [0.5, 30.0]
    settings = settings_of(flags, tmp_path)
    assert "--speculative-outcome-budget" not in settings.draft_flags
    assert settings.distant_flags == ("--distant", "--speculative-outcome-budget", "8")


def test_fixed_modes_are_not_paused(tmp_path: Path) -> None:
    settings = settings_of(parse(["--concurrency", "1", "32"], None), tmp_path)
    assert settings.target_flags[-2:] == ("--candidate-wait-sequences", "32")
    assert "--speculative-outcome-budget" in settings.draft_flags


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--shapes", "3,1"], "3,1 is not STEPS,TOPK,TOKENS"),
        (["--concurrency", "4", "0"], "--concurrency is 0; it must be at least 1"),
        (["--repeats", "0"], "--repeats is 0"),
        (["--delay-ms", "2", "0"], r"--delay-ms is 0; it must be in \(0, 1000\]"),
        (["--adaptive", "--turnaround"], "are about fixed modes, --adaptive has none"),
        (["--scenario", "x.json"], "--scenario keeps what --check-simulator takes: give both"),
        (["--widen", "8b", "--model", "x"], "leave --model out"),
    ],
)
def test_bad_flags_are_named(
    arguments: list[str], problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        parse(arguments, None)
    assert re.search(problem, capsys.readouterr().err)


def test_wide_models_are_folders_without_weights(tmp_path: Path) -> None:
    settings = settings_of(parse(["--widen", "32b"], None), tmp_path)
    assert ModelConfig.from_folder(settings.model).num_layers == 64
    draft = Path(
        settings.draft_flags[settings.draft_flags.index("--speculative-draft-model-path") + 1]
    )
    assert ModelConfig.from_folder(draft).hidden_size == 2048
    assert not list(tmp_path.rglob("*.safetensors"))
    assert not settings.logs_rounds


def test_a_wide_head_belongs_to_the_wide_target(tmp_path: Path) -> None:
    flags = parse(["--widen", "trial", "--algorithm", "EAGLE3", "--timeline", "x.svg"], None)
    settings = settings_of(flags, tmp_path)
    folder = settings.draft_flags.index("--target-model-path") + 1
    assert settings.draft_flags[folder] == str(settings.model)
    assert list((tmp_path / "draft").glob("*.safetensors"))
    assert settings.logs_rounds


def test_there_are_questions_for_many_at_a_time() -> None:
    assert len(set(questions(64))) == 64
