"""Rounds whose trees the device selects, of a target that chooses what pays."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from services.draft.fan_out import FanOut
from services.target.control.adaptive_config import AdaptiveConfig, Candidates
from services.target.control.course import Kept
from services.target.control.speculation_controller import SpeculationController
from services.target.control.tree_cuts import Ready, TreeCuts
from services.target.engine import Engine
from services.target.step_report import StepReport
from shared.models.decoder import Decoder
from tests.helpers.ahead_cases import CHAIN, SAMPLINGS, TREE, outputs, requests, total_outcomes
from tests.helpers.engines import build_engine, run, tiny_decoder
from tests.helpers.lossy_draft import LossyDraft
from tests.helpers.standalone_drafts import standalone
from tests.helpers.wired_draft import WiredDraft

BUDGET = FanOut(6)
ALWAYS_ON = AdaptiveConfig({1: Candidates(steps=(1, 2, 3), may_pause=False)})
MOST_TURNS = 12


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    return tiny_decoder(tmp_path_factory.mktemp("decoder"))


def _engine(
    decoder: Decoder, speculation: SpeculationController, reports: list[StepReport]
) -> Engine:
    return build_engine(
        decoder,
        on_step=reports.append,
        poisons_free_pages=True,
        selects=True,
        speculation=speculation,
    )


def _num_selected(reports: Sequence[StepReport]) -> int:
    return sum(each.num_rounds for each in reports if each.round_shape is not None)


def _all_but_the_last(
    cuts: TreeCuts, ready: Sequence[Ready], num_rows: int, *, may_probe: bool
) -> list[Kept | None]:
    """Cuts a node from every tree that has two."""
    nodes = [tuple(range(len(each.tree) - 1)) for each in ready]
    return [
        Kept(each.tree.only(kept), kept) if kept else None
        for each, kept in zip(ready, nodes, strict=True)
    ]


class _Fickle(SpeculationController):
    """Lets trees be verified whole for some turns, then has some cut, and so on."""

    def __init__(self, seed: int) -> None:
        super().__init__(ALWAYS_ON)
        self._draw = random.Random(seed)
        self._num_left, self._is_whole = 0, False

    @property
    def verifies_whole_trees(self) -> bool:
        if not self._num_left:
            self._num_left = self._draw.randint(1, MOST_TURNS)
            self._is_whole = not self._is_whole
        self._num_left -= 1
        return self._is_whole


@pytest.mark.parametrize("sampling", ["greedy", "sampled"])
def test_rounds_are_selected_where_no_tree_is_cut(
    decoder: Decoder, sampling: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        TreeCuts, "of", lambda cuts, ready, num_rows, may_probe: [None] * len(ready)
    )
    asked, reports = requests(SAMPLINGS[sampling]), list[StepReport]()
    engine = _engine(decoder, SpeculationController(ALWAYS_ON), reports)
    WiredDraft(engine, standalone(decoder), CHAIN, BUDGET).attach()
    assert outputs(run(engine, asked)) == outputs(run(build_engine(decoder), asked))
    assert _num_selected(reports) > 0.5 * sum(each.num_rounds for each in reports)
    assert total_outcomes(reports).num_hits > 0


def test_they_are_not_where_cutting_pays(decoder: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TreeCuts, "of", _all_but_the_last)
    asked, reports = requests(SAMPLINGS["greedy"], 80), list[StepReport]()
    engine = _engine(decoder, SpeculationController(ALWAYS_ON), reports)
    WiredDraft(engine, standalone(decoder), CHAIN, BUDGET).attach()
    assert outputs(run(engine, asked)) == outputs(run(build_engine(decoder), asked))
    shapes = [each.round_shape for each in reports]
    assert not any(shapes[len(shapes) // 2 :])
    assert sum(each.speculation.num_cut_nodes for each in reports) > 0


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("sampling", ["greedy", "sampled"])
def test_going_from_one_to_the_other_changes_nothing(
    decoder: Decoder, sampling: str, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TreeCuts, "of", _all_but_the_last)
    asked, reports = requests(SAMPLINGS[sampling]), list[StepReport]()
    engine = _engine(decoder, _Fickle(seed), reports)
    drafter = standalone(decoder)
    draft = LossyDraft(
        engine,
        drafter,
        (CHAIN, TREE)[seed % 2],
        BUDGET,
        seed=seed,
        delay=2 + seed,
        loss=(0.0, 0.2)[seed % 2],
    )
    draft.attach()
    found = outputs(run(engine, asked, each_step=draft.each_step))
    assert found == outputs(run(build_engine(decoder), asked))
    drafter.check()
    assert _num_selected(reports) > 0
    assert sum(each.speculation.num_cut_nodes for each in reports) > 0
