"""SGLang's file of candidate steps, and the shapes that follow from it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from services.target.adaptive_config import (
    DEFAULT_CONFIG,
    AdaptiveConfig,
    Candidates,
    chain,
    read_adaptive_config,
    shape_of,
)
from services.target.settings import TargetSettings
from shared.errors import SettingsError
from shared.tokens import TreeShape


def _write(path: Path, content: object) -> Path:
    file = path / "adaptive.json"
    file.write_text(json.dumps(content))
    return file


def test_candidates_of_the_largest_size_that_is_not_above_the_batch_hold(tmp_path: Path) -> None:
    content = {
        "1": {"candidate_steps": [1, 3, 7], "up_hysteresis": 0.0, "down_hysteresis": -0.25},
        "8": {"candidate_steps": [0, 1, 3], "ceiling_coeff": 0},
        "ema_alpha": 0.2,
        "update_interval": 5,
        "warmup_batches": 10,
    }
    config = read_adaptive_config(_write(tmp_path, content))
    few, many = config.candidates(7), config.candidates(64)
    assert few.steps == (1, 3, 7)
    assert not few.may_pause
    assert many.steps == (1, 3)
    assert many.may_pause


def test_knobs_without_batch_sizes_hold_for_all(tmp_path: Path) -> None:
    config = read_adaptive_config(_write(tmp_path, {"candidate_steps": [0, 2]}))
    assert config.candidates(1) == config.candidates(100)
    assert config.candidates(1).steps == (2,)


@pytest.mark.parametrize("strategy", ["ema", "throughput_aware"])
def test_files_of_either_rule_of_sglang_are_read(tmp_path: Path, strategy: str) -> None:
    content = {
        "strategy": strategy,
        "window_size": 20,
        "update_interval": 10,
        "profile_run_batch_sizes": None,
        "max_profile_run_batch_size": 128,
        "profile_run_seq_len": 512,
        "profile_run_n_warmup": 5,
        "profile_run_n_measure": 10,
        "1": {"candidate_steps": [1, 3, 5, 7]},
        "32": {"candidate_steps": [1, 3]},
    }
    config = read_adaptive_config(_write(tmp_path, content))
    assert (config.candidates(1).steps, config.candidates(40).steps) == ((1, 3, 5, 7), (1, 3))


def test_what_is_wrong_for_all_sizes_is_said_once(tmp_path: Path) -> None:
    content = {"step": 1, "1": {"candidate_steps": [1]}, "8": {"candidate_steps": ["x"]}, "9": 2}
    with pytest.raises(SettingsError) as caught:
        read_adaptive_config(_write(tmp_path, content))
    first, second, third = caught.value.problems
    assert "json: step is unknown" in first
    assert "json: 8: candidate_steps is ['x']" in second
    assert "json: 9 is 2" in third


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ([1], "holds list; it must be an object"),
        ({"1": {"candidate_steps": []}}, "candidate_steps is []"),
        ({"1": {"candidate_steps": [1, 33]}}, "must be a list of whole numbers in [0, 32]"),
        ({"1": {"candidate_steps": [True]}}, "candidate_steps is [True]"),
        ({"candidate_step": [1]}, "candidate_step is unknown; known are"),
        ({"1": 3}, "1 is 3; it must be an object"),
        ({"²": {"candidate_steps": [1]}}, "² is unknown"),
    ],
)
def test_a_bad_file_is_refused_by_key_value_and_limit(
    tmp_path: Path, content: object, problem: str
) -> None:
    with pytest.raises(SettingsError) as caught:
        read_adaptive_config(_write(tmp_path, content))
    assert problem in str(caught.value)


def test_a_missing_file_and_bad_json_are_refused(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="No such file"):
        read_adaptive_config(tmp_path / "none.json")
    (tmp_path / "bad.json").write_text("{")
    with pytest.raises(SettingsError, match=r"bad\.json"):
        read_adaptive_config(tmp_path / "bad.json")


def test_a_chain_stays_a_chain_at_any_depth() -> None:
    assert shape_of(TreeShape(3, 1, 4), 7) == TreeShape(7, 1, 8)
    shapes = Candidates().shapes(TreeShape(3, 1, 4))
    assert shapes == tuple(map(chain, (1, 2, 3, 5, 7)))


def test_a_tree_keeps_its_breadth_and_density_and_may_become_a_chain() -> None:
    base = TreeShape(5, 4, 16)
    assert shape_of(base, 3) == TreeShape(3, 4, 10)
    assert base in Candidates().shapes(base)
    assert chain(5) in Candidates().shapes(base)


def test_a_step_count_of_0_alone_leaves_plain_steps(tmp_path: Path) -> None:
    found = read_adaptive_config(_write(tmp_path, {"candidate_steps": [0]})).candidates(1)
    assert found.may_pause
    assert found.shapes(TreeShape(5, 4, 16)) == ()


def test_a_drafter_made_for_one_step_is_not_asked_for_many() -> None:
    assert max(s.num_steps for s in Candidates().shapes(TreeShape(1, 1, 2))) == 3


def test_the_deepest_chain_ahead_is_for_few_sequences() -> None:
    most = {shape: DEFAULT_CONFIG.most_lanes(shape, chain(3)) for shape in (chain(10), chain(7))}
    assert most == {chain(10): 4, chain(7): None}
    asked = AdaptiveConfig({1: Candidates(steps=(3, 10))})
    assert asked.most_lanes(chain(10), chain(3)) is None


def test_rounds_on_the_device_come_in_few_shapes_no_larger_than_the_draft_s_own() -> None:
    tree = TreeShape(5, 4, 16)
    assert DEFAULT_CONFIG.round_shapes(tree) == (tree, chain(5), chain(3), chain(1))
    assert DEFAULT_CONFIG.round_shapes(chain(3)) == (chain(3), chain(2), chain(1))
    assert DEFAULT_CONFIG.round_shapes(chain(1)) == (chain(1),)
    ahead = DEFAULT_CONFIG.round_shapes(chain(3), drafts_ahead=True)
    assert ahead == (chain(3), chain(10), chain(7), chain(5), chain(1))
    ahead = DEFAULT_CONFIG.round_shapes(chain(9), drafts_ahead=True)
    assert ahead == (chain(9), chain(5), chain(1)), "eleven steps are too many"
    short = TreeShape(6, 1, 3)  # two nodes
    assert DEFAULT_CONFIG.round_shapes(short) == (short, chain(1))


def test_rounds_on_the_device_have_the_depths_that_are_set() -> None:
    base = TreeShape(4, 2, 9)
    config = AdaptiveConfig({1: Candidates(steps=(2, 4)), 8: Candidates(steps=(1,))})
    found = config.round_shapes(base)
    assert found[0] == base
    assert set(found) == {base, chain(4), shape_of(base, 2), chain(2), shape_of(base, 1), chain(1)}
    assert AdaptiveConfig({1: Candidates(steps=())}).round_shapes(base) == (base,)


def test_the_default_candidates_may_pause() -> None:
    assert DEFAULT_CONFIG.candidates(1).may_pause


def test_a_config_without_the_choice_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="no effect without --speculative-adaptive"):
        TargetSettings(
            speculative_adaptive=False, speculative_adaptive_config=tmp_path / "adaptive.json"
        )


def test_a_bad_file_is_refused_with_the_other_settings(tmp_path: Path) -> None:
    file = _write(tmp_path, {"candidate_steps": [99]})
    with pytest.raises(SettingsError) as caught:
        TargetSettings(speculative_adaptive=True, speculative_adaptive_config=file, device="tpu")
    assert len(caught.value.problems) == 2
    assert "candidate_steps is [99]" in str(caught.value)


def test_what_may_be_asked_for_at_any_size_is_told_at_the_start() -> None:
    config = AdaptiveConfig({1: Candidates(steps=(3, 5)), 8: Candidates(steps=(1,))})
    assert config.shapes(chain(3)) == (chain(1), chain(5))
    assert DEFAULT_CONFIG.shapes(chain(3)) == (chain(1), chain(2), chain(5), chain(7))
