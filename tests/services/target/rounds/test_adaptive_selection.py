"""Rounds whose trees the device selects, of a target that chooses what pays."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

import pytest

from services.draft.fan_out import FanOut
from services.target.control.adaptive_config import AdaptiveConfig, Candidates
from services.target.control.kept import Kept
from services.target.control.speculation_controller import SpeculationController
from services.target.control.speed_window import SpeedWindow
from services.target.control.step_times import StepTimes
from services.target.control.tree_cuts import Ready, TreeCuts
from services.target.control.turnarounds import Turnarounds
from services.target.engine import Engine
from services.target.rounds.selected_rounds import SelectedRounds
from services.target.step_report import StepReport
from shared.models.decoder import Decoder
from shared.tokens import Candidate, DraftReport
from tests.helpers.ahead_cases import (
    CHAIN,
    SAMPLINGS,
    lossy_draft,
    num_device_rounds,
    outputs,
    requests,
    total_outcomes,
)
from tests.helpers.engines import Clock, build_engine, run, tiny_decoder
from tests.helpers.standalone_drafts import standalone
from tests.helpers.wired_draft import WiredDraft

BUDGET = FanOut(6)
ALWAYS_ON = AdaptiveConfig({1: Candidates(steps=(1, 2, 3), may_pause=False)})
MOST_TURNS = 12


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    return tiny_decoder(tmp_path_factory.mktemp("decoder"))


def _engine(
    decoder: Decoder,
    speculation: SpeculationController,
    reports: list[StepReport],
    *,
    overlaps: bool = True,
    clock: Clock | None = None,
) -> Engine:
    return build_engine(
        decoder,
        on_step=reports.append,
        poisons_free_pages=True,
        selects=True,
        speculation=speculation,
        overlaps=overlaps,
        clock=clock,
    )


@pytest.fixture
def _no_cuts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        TreeCuts, "of", lambda cuts, ready, num_rows, may_probe: [None] * len(ready)
    )


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


class _Sum(SpeedWindow):
    """Adds up the time of all turns."""

    def __init__(self) -> None:
        super().__init__()
        self.total_s = 0.0

    def clear(self) -> None:
        self.total_s += self.elapsed_s
        super().clear()


@pytest.mark.parametrize("sampling", ["greedy", "sampled"])
@pytest.mark.usefixtures("_no_cuts")
def test_rounds_are_selected_where_no_tree_is_cut(decoder: Decoder, sampling: str) -> None:
    asked, reports = requests(SAMPLINGS[sampling]), list[StepReport]()
    engine = _engine(decoder, SpeculationController(ALWAYS_ON), reports)
    WiredDraft(engine, standalone(decoder), CHAIN, BUDGET).attach()
    assert outputs(run(engine, asked)) == outputs(run(build_engine(decoder), asked))
    assert num_device_rounds(reports) > 0.5 * sum(each.num_rounds for each in reports)
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
    draft = lossy_draft(engine, drafter, BUDGET, seed)
    found = outputs(run(engine, asked, each_step=draft.each_step))
    assert found == outputs(run(build_engine(decoder), asked))
    drafter.check()
    assert num_device_rounds(reports) > 0
    assert sum(each.speculation.num_cut_nodes for each in reports) > 0


@pytest.mark.usefixtures("_no_cuts")
def test_sequences_come_to_a_draft_once_it_has_shown_that_it_is_warm(decoder: Decoder) -> None:
    """A new draft has one of them first, which rounds could go on with for ever."""
    asked, reports, counts = requests(SAMPLINGS["greedy"], 80), list[StepReport](), list[int]()
    engine = _engine(decoder, SpeculationController(ALWAYS_ON), reports)
    WiredDraft(engine, standalone(decoder), CHAIN, BUDGET).attach()
    run(engine, asked, each_step=lambda step: counts.append(engine.gauges_now().num_drafted_for))
    assert counts[2] == 1
    assert max(counts) == len(asked)
    assert counts.index(len(asked)) < 20


@pytest.mark.parametrize("overlaps", [True, False])
@pytest.mark.parametrize("seed", range(3))
def test_all_time_counts_once(
    decoder: Decoder, seed: int, overlaps: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of rounds, of other steps, and of going from one to the other."""
    monkeypatch.setattr(TreeCuts, "of", _all_but_the_last)
    durations_s, clock, controller = list[float](), Clock(), _Fickle(seed)
    end_step = controller.end_step

    def end(report: StepReport, duration_s: float, *, is_timed: bool) -> None:
        durations_s.append(duration_s)
        end_step(report, duration_s, is_timed=is_timed)

    monkeypatch.setattr(controller, "end_step", end)
    controller._turns._turn = turns = _Sum()
    reports: list[StepReport] = []
    engine = _engine(decoder, controller, reports, overlaps=overlaps, clock=clock)
    WiredDraft(engine, standalone(decoder), CHAIN, BUDGET).attach()
    run(engine, requests(SAMPLINGS["greedy"], 80))
    assert num_device_rounds(reports) > 0
    assert 0.8 * clock.now_s < turns.total_s <= clock.now_s
    assert sum(durations_s) <= clock.now_s


@pytest.mark.parametrize("overlaps", [True, False])
@pytest.mark.usefixtures("_no_cuts")
def test_a_tree_that_is_here_before_its_verdict_goes_out_was_not_waited_for(
    decoder: Decoder, overlaps: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though the round that verifies it is launched before that, too."""
    waits_s: list[float] = []

    def observe(
        turnarounds: Turnarounds,
        num_steps: int,
        num_sequences: int,
        turnaround_s: float,
        *args: object,
        is_foreseen: bool,
        is_ahead: bool,
    ) -> None:
        waits_s.extend([turnaround_s] if is_foreseen else [])

    monkeypatch.setattr(Turnarounds, "observe", observe)
    monkeypatch.setattr(Turnarounds, "is_known", True)
    reports: list[StepReport] = []
    engine = _engine(decoder, SpeculationController(ALWAYS_ON), reports, overlaps=overlaps)
    WiredDraft(engine, standalone(decoder), CHAIN, BUDGET).attach()
    run(engine, requests(SAMPLINGS["greedy"], 80))
    assert len(waits_s) > 10
    assert set(waits_s) == {0.0}
    assert len(waits_s) < len(reports), "each counts once"


@pytest.mark.parametrize("captures", [True, False])
@pytest.mark.parametrize("overlaps", [True, False])
@pytest.mark.usefixtures("_no_cuts")
def test_rounds_whose_graphs_were_captured_meanwhile_are_not_timed(
    decoder: Decoder, captures: bool, overlaps: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor is anything judged by them."""
    counts = itertools.count() if captures else itertools.repeat(0)
    monkeypatch.setattr(SelectedRounds, "num_captured", property(lambda rounds: next(counts)))
    monkeypatch.setattr(StepTimes, "is_sure", lambda times, num_rows: True)
    controller, reports = SpeculationController(ALWAYS_ON), list[StepReport]()
    timed, judged = list[bool](), list[int]()
    end_step = controller.end_step

    def end(report: StepReport, duration_s: float, *, is_timed: bool) -> None:
        timed.extend([is_timed] if report.round_shape is not None else [])
        end_step(report, duration_s, is_timed=is_timed)

    monkeypatch.setattr(controller, "end_step", end)
    monkeypatch.setattr(SpeedWindow, "add", lambda window, turn: judged.append(turn.num_rounds))
    engine = _engine(decoder, controller, reports, overlaps=overlaps)
    WiredDraft(engine, standalone(decoder), CHAIN, BUDGET).attach()
    run(engine, requests(SAMPLINGS["greedy"], 80))
    num_rounds = num_device_rounds(reports)
    assert num_rounds > 0
    if captures:
        assert sum(timed) <= 2, "of the last ones, behind which nothing is launched"
        assert sum(judged) < 0.5 * num_rounds
    else:
        assert sum(timed) > 0.5 * len(timed)
        assert sum(judged) > 0.5 * num_rounds


class _PinnedDraft(WiredDraft):
    """Says with everything it sends that its shape is the operator's."""

    def offer(self, candidates: tuple[Candidate, ...]) -> None:
        self.engine.offer(self.name, candidates, DraftReport(pinned_shape=CHAIN))


@pytest.mark.parametrize("kind", [_PinnedDraft, WiredDraft])
def test_trees_of_a_pinned_draft_are_never_cut(decoder: Decoder, kind: type[WiredDraft]) -> None:
    asked, reports = requests(SAMPLINGS["greedy"]), list[StepReport]()
    engine = _engine(decoder, SpeculationController(), reports)
    draft = kind(engine, standalone(decoder), CHAIN, BUDGET)
    draft.attach()
    draft.offer(())
    assert outputs(run(engine, asked)) == outputs(run(build_engine(decoder), asked))
    # What is free waits until it is known to pay, which takes longer than these answers.
    assert (num_device_rounds(reports) > 0) is (kind is _PinnedDraft)
