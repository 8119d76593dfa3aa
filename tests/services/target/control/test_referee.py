"""Speculation runs where it is measured to be faster, and is tried within a budget elsewhere."""

from __future__ import annotations

import random

from services.target.control.adaptive_config import AdaptiveConfig, Candidates
from services.target.control.choices import Freedom
from services.target.control.probe_budget import PROBE_SHARE, ProbeBudget
from services.target.control.referee import WINDOW_ROUNDS, Referee
from services.target.control.regime import Stance
from services.target.control.speculation_controller import SpeculationController
from services.target.control.speed_window import SpeedWindow

STEP_S = 0.01


class _Machine:
    """Plain steps of 10 ms; speculation is `1 + gain` times as fast, with noise."""

    def __init__(self, gain: float, seed: int = 0) -> None:
        self.referee = Referee(ProbeBudget())
        self.gain = gain
        self.now_s = self.plain_s = 0.0
        self.num_on = self.num_windows = 0
        self._random = random.Random(seed)

    def run(self, num_windows: int, num_sequences: int = 4) -> None:
        """Decodes for so many windows."""
        for _ in range(num_windows):
            is_on = self.referee.stance is Stance.ON
            speed = 1.0 + (self.gain if is_on else 0.0)
            speed *= 1.0 + self._random.gauss(0.0, 0.1 if is_on else 0.02)
            work_s = WINDOW_ROUNDS * STEP_S
            elapsed_s = work_s / speed
            turn = SpeedWindow(work_s, elapsed_s, WINDOW_ROUNDS * num_sequences)
            self.referee.window.add(turn)
            self.referee.budget.earn(self.referee.eagerness * elapsed_s)
            self.referee.judge(num_sequences, STEP_S, is_settled=True, may_end=True)
            self.now_s += elapsed_s
            self.plain_s += work_s
            self.num_on += is_on
            self.num_windows += 1

    @property
    def is_on(self) -> bool:
        return self.referee.stance is Stance.ON

    @property
    def over_plain(self) -> float:
        return self.plain_s / self.now_s


def test_it_is_off_before_anything_is_known() -> None:
    assert Referee(ProbeBudget()).stance is Stance.OFF


def test_a_gain_is_found_and_used() -> None:
    machine = _Machine(0.3)
    machine.run(100)
    assert machine.referee.stance is Stance.ON
    assert machine.num_on > 80
    assert machine.over_plain > 1.2


def test_a_loss_is_left_alone_but_for_trials_within_the_budget() -> None:
    machine = _Machine(-0.3)
    machine.run(50)
    learnt_s, learnt_plain_s = machine.now_s, machine.plain_s
    machine.run(4000)
    lost_s = machine.now_s - learnt_s - (machine.plain_s - learnt_plain_s)
    assert lost_s < 2 * PROBE_SHARE * (machine.now_s - learnt_s)
    regime = machine.referee.regime
    assert regime is not None
    assert regime.num_trials > 3, "it goes on trying"


def test_no_gain_costs_next_to_nothing() -> None:
    machine = _Machine(-0.02)
    machine.run(3000)
    assert machine.over_plain > 0.985


def test_trials_get_rarer_the_more_have_failed() -> None:
    machine = _Machine(-0.5)
    regimes = machine.referee.regimes
    machine.run(1000)
    first = regimes[2].num_trials
    machine.run(1000)
    assert regimes[2].num_trials - first < first


def test_a_loss_that_turns_into_a_gain_is_noticed_and_the_other_way_round() -> None:
    machine = _Machine(-0.3)
    machine.run(500)
    assert not machine.is_on
    machine.gain = 0.5
    machine.run(3000)
    assert machine.is_on
    machine.gain = -0.3
    before = machine.num_on
    machine.run(200)
    assert not machine.is_on
    assert machine.num_on - before < 20


def test_batch_sizes_are_judged_apart() -> None:
    machine = _Machine(0.5)
    machine.run(100, num_sequences=1)
    machine.gain = -0.4
    machine.run(200, num_sequences=32)
    assert not machine.is_on
    machine.gain = 0.5
    machine.run(30, num_sequences=1)
    assert machine.is_on, "what was learnt of one is still known"


def test_a_gain_for_one_is_no_promise_for_many() -> None:
    machine = _Machine(1.0)
    machine.run(100, num_sequences=1)
    assert machine.is_on
    machine.gain = -0.5
    machine.run(1, num_sequences=8)
    assert not machine.is_on, "plain decoding is measured first"
    machine.run(100, num_sequences=8)
    regime = machine.referee.regimes[3]
    assert 1 <= regime.num_trials <= 5
    machine.gain = 1.0
    machine.run(30, num_sequences=1)
    assert machine.is_on


def test_what_ran_on_a_promise_was_a_trial() -> None:
    machine = _Machine(1.3)
    machine.run(60, num_sequences=4)
    regimes = machine.referee.regimes
    while 3 not in regimes:
        machine.run(1, num_sequences=8)
    assert machine.is_on, "half of a large gain is expected still"
    machine.gain = -0.5
    while machine.is_on:
        machine.run(1, num_sequences=8)
        assert machine.num_windows < 140
    assert regimes[3].num_trials == 1


def test_a_hopeless_trial_ends_before_its_window_does() -> None:
    for speed, is_on in ((0.4, False), (0.8, True)):
        machine = _Machine(-0.5)
        referee = machine.referee
        while not (machine.is_on and not referee.is_settling):
            machine.run(1, num_sequences=32)
        turn = SpeedWindow(STEP_S, STEP_S / speed, num_rounds=32)
        referee.window.add(turn)
        referee.judge(32, STEP_S, is_settled=True, may_end=True)
        assert machine.is_on is is_on


def test_a_size_between_two_regimes_does_not_flap() -> None:
    machine = _Machine(0.0)
    for window in range(200):
        machine.run(1, num_sequences=5 + window % 2)
    assert len(machine.referee.regimes) == 1


def test_what_may_be_chosen_follows_from_what_is_known() -> None:
    machine = _Machine(0.4)
    machine.run(2)
    seen = set()
    for _ in range(60):
        machine.run(1)
        if machine.referee.stance is Stance.ON:
            seen.add(machine.referee.freedom)
    assert seen == {Freedom.NONE, Freedom.ANY}


def test_losses_in_a_row_end_it_however_good_it_was() -> None:
    machine = _Machine(2.0)
    machine.run(300)
    machine.gain = -0.1
    machine.run(12)
    assert machine.referee.regime is not None
    assert not machine.referee.regime.pays


def test_prompts_count_as_what_they_cost_plain_decoding() -> None:
    """A window with a prompt is no slower than one without."""
    referee = Referee(ProbeBudget())
    for _ in range(8):
        turn = SpeedWindow(0.04, 0.04 + 50 * 0.001, 4 * WINDOW_ROUNDS, num_prompt_rows=50)
        referee.window.add(turn)
        referee.judge(4, STEP_S, is_settled=True, may_end=True)
        if referee.stance is not Stance.OFF:
            break
    assert referee.regime is not None
    assert abs(referee.regime.estimate.level - 1.0) < 0.01


def test_where_it_may_not_be_off_it_is_on() -> None:
    referee = Referee(ProbeBudget())
    referee.insist()
    assert referee.stance is Stance.ON


def test_where_it_may_not_be_off_nothing_is_a_trial() -> None:
    """Also not in the regime of fewer sequences, where it is one."""
    config = AdaptiveConfig({1: Candidates(), 4: Candidates(may_pause=False)})
    controller, machine = SpeculationController(config), _Machine(-0.5)
    machine.referee = referee = controller.referee
    while not machine.is_on:
        machine.run(1, num_sequences=1)
    assert (referee.freedom, referee.num_trials) == (Freedom.NONE, 1)
    controller.judge([], 4)
    credit_s = referee.budget.credit_s
    referee.charge(SpeedWindow(0.04, 0.08, WINDOW_ROUNDS))
    assert (referee.freedom, referee.num_trials) == (Freedom.ANY, None)
    assert (machine.is_on, referee.budget.credit_s) == (True, credit_s)
    controller.judge([], 1)
    assert (referee.freedom, referee.num_trials) == (Freedom.NONE, 1)


def test_a_trial_that_cannot_tell_is_put_off_and_made_again() -> None:
    machine = _Machine(-0.5)
    while not machine.is_on:
        machine.run(1)
    referee, regime = machine.referee, machine.referee.regime
    assert regime is not None
    credit_s, freedom = referee.budget.credit_s, regime.freedom
    for _ in range(5):
        referee.put_off()
        assert referee.stance is Stance.OFF
        while not machine.is_on:
            machine.run(1)
        assert regime.freedom is freedom, "it is the same one"
    assert (regime.num_trials, regime.num_failed) == (1, 0)
    assert referee.budget.credit_s <= credit_s + 0.05, "nothing is granted again"
    machine.run(20)
    assert regime.num_failed > 0


def test_speculation_that_pays_goes_on_while_drafts_prepare_something() -> None:
    machine = _Machine(0.5)
    machine.run(100)
    machine.referee.put_off()
    assert machine.is_on
