"""What the referee hears of the turns of the step loop."""

from __future__ import annotations

import pytest

from services.target.control.decode_costs import DecodeCosts
from services.target.control.probe_budget import ProbeBudget
from services.target.control.referee import Referee
from services.target.control.regime import Stance
from services.target.control.speculation_controller import SpeculationController
from services.target.control.turn_account import TurnAccount
from services.target.step_report import StepReport
from tests.helpers.step_reports import step_report

STEP_S = 0.01


def _report(num_rows: int, *, num_drafted: int = 0) -> StepReport:
    return step_report(duration_s=0.0, num_rows=num_rows, num_drafted=num_drafted)


class _Loop:
    """One sequence whose plain steps take 10 ms, in a trial of speculation."""

    def __init__(self) -> None:
        self.costs, self.now_s = DecodeCosts(), 0.0
        self.referee = Referee(ProbeBudget(credit_s=1.0))
        self.turns = TurnAccount(self.referee, self.costs)
        self.turns.num_decoding = 1
        for _ in range(6):
            self.costs.observe_step(1, STEP_S, is_quiet=True)
        while self.referee.stance is not Stance.ON:
            self.turn(_report(1), STEP_S)
            self.turns.judge([], 1)
        self.referee.is_settling = False
        self.referee.window.clear()

    def turn(self, report: StepReport, duration_s: float) -> None:
        self.turns.wake(self.now_s)
        self.now_s += duration_s
        self.turns.count(report, duration_s, is_timed=True)
        self.turns.end(self.now_s)


def test_a_step_that_may_be_a_cold_start_is_paid_for_but_tells_nothing() -> None:
    loop = _Loop()
    credit_s = loop.referee.budget.credit_s
    loop.turn(_report(4, num_drafted=3), 0.5)
    assert loop.referee.window.num_rounds == 0
    assert loop.referee.window.elapsed_s == 0.0
    assert credit_s - loop.referee.budget.credit_s == pytest.approx(0.49, abs=0.01)


def test_a_step_of_a_known_width_counts_as_what_it_is() -> None:
    loop = _Loop()
    for _ in range(3):
        loop.costs.observe_step(4, STEP_S, is_quiet=True)
    credit_s = loop.referee.budget.credit_s
    loop.turn(_report(4, num_drafted=3), 0.5)
    assert loop.referee.window.num_rounds == 1
    assert loop.referee.window.elapsed_s == pytest.approx(0.5)
    assert loop.referee.budget.credit_s == credit_s, "windows are paid for at their end"


def test_only_what_follows_a_turn_without_a_step_is_waiting() -> None:
    loop = _Loop()
    loop.turn(_report(1), STEP_S)
    assert loop.turns.wake(loop.now_s + 0.001) == 0.0, "the loop was on its way"
    loop.turns.end(loop.now_s + 0.001)  # nothing could step
    assert loop.turns.wake(loop.now_s + 0.004) == pytest.approx(0.003)
    loop.turns.end(loop.now_s + 0.004)
    assert loop.turns.wake(loop.now_s + 0.006) == pytest.approx(0.002)


def test_a_loop_that_knows_that_it_waited_says_so() -> None:
    loop = _Loop()
    loop.turn(_report(1), STEP_S)
    assert loop.turns.wake(loop.now_s + 0.001, was_idle=True) == pytest.approx(0.001)


def test_a_turn_that_nobody_woke_for_began_with_the_end_of_the_last_one() -> None:
    loop = _Loop()
    loop.turn(_report(1), STEP_S)
    for _ in range(2):
        loop.now_s += STEP_S
        loop.turns.count(_report(1), STEP_S, is_timed=True)
        loop.turns.end(loop.now_s)
    assert loop.referee.window.elapsed_s == pytest.approx(3 * STEP_S)


@pytest.mark.parametrize("is_wanted", [True, False])
def test_nothing_is_tried_where_nobody_may_have_a_draft(is_wanted: bool) -> None:
    controller, stances = SpeculationController(), set[Stance]()
    for step in range(30):
        controller.wake(step * STEP_S)
        controller.judge([], 1, is_wanted=is_wanted)
        controller.begin_step([], [], step * STEP_S, num_plain=1, num_stepping=1, num_late=0)
        controller.end_step(_report(1), STEP_S, is_timed=True)
        controller.rest((step + 1) * STEP_S)
        stances.add(controller.stance)
    assert (Stance.ON in stances) is is_wanted
    assert (controller.budget.credit_s != 0.0) is is_wanted
