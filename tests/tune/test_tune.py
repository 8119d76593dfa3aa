"""The tuner: its search on figures that are known, and on a draft that runs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from shared.rpc.channel import open_channel
from tests.services.draft.scripted_drafter import serving_scripted_draft
from tests.tune.__main__ import PLAIN, Trial, best, report
from tests.tune.draft_config import DraftConfig
from tests.tune.search import AXES, Shape, best_of, coordinate_descent, neighbours


def _hill(shape: Shape) -> float:
    """Highest at 4/4/16."""
    return 100 - 5 * abs(shape.steps - 4) - 4 * abs(shape.topk - 4) - abs(shape.tokens - 16)


async def test_the_top_of_a_hill_is_found_with_few_measurements() -> None:
    measured: list[Shape] = []

    async def measure(shape: Shape) -> float:
        measured.append(shape)
        return _hill(shape)

    trials = await coordinate_descent(Shape(3, 1, 4), measure)
    assert best_of(trials) == Shape(4, 4, 16)
    assert len(measured) == len(set(measured)) == len(trials)
    assert len(measured) < len(AXES["steps"]) * len(AXES["topk"]) * len(AXES["tokens"]) / 3


async def test_a_start_that_nothing_beats_is_kept() -> None:
    start = Shape(3, 1, 4)

    async def measure(shape: Shape) -> float:
        return 1.0 if shape == start else 0.5

    trials = await coordinate_descent(start, measure)
    assert best_of(trials) == start


@pytest.mark.parametrize("axis", list(AXES))
@pytest.mark.parametrize("shape", [Shape(3, 1, 4), Shape(4, 4, 16), Shape(1, 8, 8)])
def test_neighbours_are_shapes_a_draft_can_make(shape: Shape, axis: str) -> None:
    found = neighbours(shape, axis)
    assert all(each.is_possible for each in found)
    assert shape not in found


def test_of_equal_figures_the_smallest_tree_is_best() -> None:
    assert best_of({Shape(4, 2, 16): 1.0, Shape(3, 2, 8): 1.0}) == Shape(3, 2, 8)


def _trial(concurrency: int, setting: str, tokens_per_s: float) -> Trial:
    return Trial("remote", concurrency, setting, tokens_per_s, 10.0, 5.0)


def test_the_report_names_the_flags_of_the_best_shape(tmp_path: Path) -> None:
    trials = [
        _trial(1, PLAIN, 100.0),
        _trial(1, "4/2/16", 250.0),
        _trial(8, PLAIN, 900.0),
        _trial(8, "3/1/4", 800.0),
    ]
    assert [each.setting for each in best(trials)] == ["4/2/16", PLAIN]
    text = report(trials, tmp_path)
    assert "2.50x" in text
    flags = "--speculative-num-steps 4 --speculative-eagle-topk 2 --speculative-num-draft-tokens 16"
    assert f"at 1: {flags}" in text
    assert "at 8: ALGORITHM=NONE" in text
    assert len(json.loads((tmp_path / "trials.json").read_text())) == 4
    assert (tmp_path / "trials.png").stat().st_size > 1000


async def test_a_running_draft_is_set_and_left_as_it_was_found() -> None:
    async with serving_scripted_draft() as process:
        async with open_channel(f"127.0.0.1:{process.port}") as channel:
            async with DraftConfig(channel) as draft:
                found = draft.shape
                await draft.set(Shape(5, 2, 12))
                async with DraftConfig(channel) as again:
                    assert again.shape == Shape(5, 2, 12)
                await draft.unpin()
            async with DraftConfig(channel) as after:
                assert after.shape == found
