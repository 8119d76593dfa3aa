"""Whatever the policy chooses at whatever turn, no token changes."""

from __future__ import annotations

import itertools
import random

import pytest

from services.target.adaptive_config import AdaptiveConfig, Candidates
from services.target.drafts.attachments import Attachments
from services.target.drafts.draft_policy import ALWAYS, DraftPolicy
from services.target.engine import Engine
from services.target.step_report import StepReport
from shared.models.decoder import Decoder
from shared.runtime.selection_runner import SelectionRunner
from shared.tokens import ShapeOrPlain
from tests.helpers.ahead_cases import (
    CHAIN,
    SAMPLINGS,
    lossy_draft,
    num_device_rounds,
    outputs,
    requests,
    total_outcomes,
)
from tests.helpers.engines import (
    build_engine,
    run,
    run_plain,
    tiny_decoder,
)
from tests.helpers.standalone_drafts import standalone
from tests.helpers.wired_draft import WiredDraft

BUDGET = 6
STEPS = (1, 2, 3)
MOST_TURNS = 4


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    return tiny_decoder(tmp_path_factory.mktemp("decoder"))


def _engine(
    decoder: Decoder,
    reports: list[StepReport],
    *,
    may_pause: bool = False,
    overlaps: bool = True,
    selects: bool = True,
) -> Engine:
    return build_engine(
        decoder,
        on_step=reports.append,
        poisons_free_pages=True,
        selects=selects,
        adaptive=AdaptiveConfig({1: Candidates(steps=STEPS, may_pause=may_pause)}),
        always_up_to=0 if may_pause else ALWAYS,
        overlaps=overlaps,
    )


class _Fickle:
    """Puts another choice in force every few turns, in and out of trials.

    Attributes:
        chosen: what was.
    """

    def __init__(self, seed: int) -> None:
        self._draw = random.Random(seed)
        self._num_left = 0
        self.chosen: list[ShapeOrPlain] = []

    def turn(self, policy: DraftPolicy, num_sequences: int, now_s: float) -> None:
        self._num_left -= 1
        if self._num_left < 0 and num_sequences:
            self._num_left = self._draw.randint(1, MOST_TURNS)
            policy.choice = self._draw.choice(policy._options(num_sequences))
            self.chosen.append(policy.choice)


@pytest.mark.parametrize("sampling", ["greedy", "sampled"])
def test_rounds_are_selected_while_a_shape_is_chosen(decoder: Decoder, sampling: str) -> None:
    asked, reports = requests(SAMPLINGS[sampling]), list[StepReport]()
    engine = _engine(decoder, reports)
    WiredDraft(engine, standalone(decoder), CHAIN, BUDGET).attach()
    assert outputs(run(engine, asked)) == outputs(run_plain(decoder, asked))
    assert num_device_rounds(reports) > 0.5 * sum(each.num_rounds for each in reports)
    assert total_outcomes(reports).num_hits > 0


@pytest.mark.parametrize("selects", [True, False], ids=["lanes", "planned"])
@pytest.mark.parametrize(
    ("sampling", "seed"), [("greedy", 0), ("greedy", 3), ("sampled", 2), ("sampled", 5)]
)
def test_any_choice_at_any_turn_changes_no_token(
    decoder: Decoder, sampling: str, seed: int, *, selects: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    fickle = _Fickle(seed)
    monkeypatch.setattr(
        DraftPolicy,
        "turn",
        lambda policy, number, now_s, reading: fickle.turn(policy, number, now_s),
    )
    asked, reports = requests(SAMPLINGS[sampling]), list[StepReport]()
    engine = _engine(decoder, reports, may_pause=True, overlaps=seed % 2 == 0, selects=selects)
    drafter = standalone(decoder)
    draft = lossy_draft(engine, drafter, BUDGET, seed)
    found = outputs(run(engine, asked, each_step=draft.each_step))
    assert found == outputs(run_plain(decoder, asked))
    drafter.check()
    engine.check_idle()
    assert len(set(fickle.chosen)) > 1
    assert sum(each.num_accepted for each in reports) > 0
    assert (num_device_rounds(reports) > 0) is selects


def test_sequences_leave_a_draft_that_no_trees_are_wanted_of_and_come_back(
    decoder: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    turns, counts = itertools.count(), list[int]()

    def turn(policy: DraftPolicy, num_sequences: int, now_s: float, num_reading: int) -> None:
        policy.choice = None if 8 <= next(turns) < 16 else CHAIN

    monkeypatch.setattr(DraftPolicy, "turn", turn)
    asked, reports = requests(SAMPLINGS["greedy"], 80), list[StepReport]()
    engine = _engine(decoder, reports, may_pause=True)
    WiredDraft(engine, standalone(decoder), CHAIN, BUDGET).attach()

    def count(step: int) -> None:
        counts.append(sum(len(each.attachment.sequence_ids) for each in engine.statuses_now()))

    collector = run(engine, asked, each_step=count)
    assert outputs(collector) == outputs(run_plain(decoder, asked))
    first_left = counts.index(0, counts.index(len(asked)))
    assert len(asked) in counts[first_left:], "they come back"


@pytest.mark.parametrize("captures", [True, False])
def test_rounds_whose_graphs_were_captured_meanwhile_say_nothing(
    decoder: Decoder, monkeypatch: pytest.MonkeyPatch, *, captures: bool
) -> None:
    counts = itertools.count() if captures else itertools.repeat(0)
    monkeypatch.setattr(SelectionRunner, "num_captured", property(lambda rounds: next(counts)))
    reports: list[StepReport] = []
    engine = _engine(decoder, reports)
    WiredDraft(engine, standalone(decoder), CHAIN, BUDGET).attach()
    run(engine, requests(SAMPLINGS["greedy"], 80))
    attachments: Attachments = engine._loop.attachments
    [policy] = attachments.drafts.policies
    num_timed = sum(len(each) for sizes in policy.times._rounds.values() for each in sizes.values())
    assert num_device_rounds(reports) > 0
    if captures:
        assert num_timed <= 2, "of the last rounds, behind which nothing is launched"
    else:
        assert num_timed > 4
