"""The fan-out that commits most a second is found, and found again when that changes."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable

import pytest

from services.target.control.fan_outs import (
    BUDGETS,
    NUM_FIRST_ROUNDS,
    NUM_HINT_ROUNDS,
    TRIALS_A_BUDGET,
    FanOut,
    FanOuts,
)

NUM_ROUNDS = 6000


def _rounds(
    fan_out: FanOut, duration_s: Callable[[int | None], float], count: int, seed: int = 1
) -> Counter[int | None]:
    """Runs rounds of 1 to 4 tokens; returns how many each budget got."""
    source, asked = random.Random(seed), Counter[int | None]()
    for _ in range(count):
        budget = fan_out.budget
        asked[budget] += 1
        fan_out.observe(budget, source.randint(1, 4), duration_s(budget) * source.uniform(0.9, 1.1))
    return asked


def _times(best: int | None) -> Callable[[int | None], float]:
    return lambda budget: 0.010 if budget == best else 0.014


@pytest.mark.parametrize("best", BUDGETS)
def test_the_best_budget_is_asked_for_but_for_trials(best: int | None) -> None:
    fan_out = FanOut()
    asked = _rounds(fan_out, _times(best), NUM_ROUNDS)
    assert asked[best] > 0.88 * NUM_ROUNDS
    assert set(asked) == set(BUDGETS), "each is tried"


def test_a_change_is_noticed() -> None:
    fan_out = FanOut()
    _rounds(fan_out, _times(None), NUM_ROUNDS)
    _rounds(fan_out, _times(0), 2500)
    assert _rounds(fan_out, _times(0), NUM_ROUNDS)[0] > 0.88 * NUM_ROUNDS


def test_a_budget_that_is_clearly_worse_is_left_after_a_few_rounds() -> None:
    fan_out = FanOut()
    asked = _rounds(fan_out, lambda budget: 0.030 if budget == 0 else 0.010, NUM_FIRST_ROUNDS + 200)
    assert NUM_HINT_ROUNDS <= asked[0] <= NUM_HINT_ROUNDS + 2


def test_until_speculation_pays_each_budget_is_in_force_for_whole_trials() -> None:
    fan_out, asked = FanOut(), list[int | None]()
    for num_trials in range(1, 2 * TRIALS_A_BUDGET + 2):
        fan_out.num_trials = num_trials
        [(budget, _)] = _rounds(fan_out, _times(None), 300).items()
        asked.append(budget)
    assert asked == [None] * TRIALS_A_BUDGET + [0] * TRIALS_A_BUDGET + [None]


def test_it_says_when_another_budget_than_the_best_is_in_force() -> None:
    fan_out = FanOut()
    tried = []
    for _ in range(NUM_FIRST_ROUNDS + 100):
        tried.append((fan_out.budget, fan_out.is_trying))
        _rounds(fan_out, _times(None), 1)
    assert set(tried) == {(None, False), (4, True), (0, True)}
    fan_out.num_trials = 1
    assert not fan_out.is_trying, "a trial of speculation is the referee's"


@pytest.mark.parametrize(("num_trials", "budget"), [(1, None), (TRIALS_A_BUDGET + 1, 0)])
def test_the_budget_that_made_it_pay_stays_in_force(num_trials: int, budget: int | None) -> None:
    fan_out = FanOut()
    fan_out.num_trials = num_trials
    _rounds(fan_out, _times(budget), 30)
    fan_out.num_trials = None
    assert fan_out.budget == budget
    assert _rounds(fan_out, _times(budget), NUM_ROUNDS)[budget] > 0.88 * NUM_ROUNDS


def test_many_sequences_are_tried_for_as_many_steps() -> None:
    few, many = FanOuts().of(1), FanOuts().of(40)
    assert (few.size, many.size) == (1, 32)
    assert None in _rounds(few, _times(None), NUM_FIRST_ROUNDS + 1)
    assert few.budget != BUDGETS[0]
    _rounds(many, _times(None), NUM_FIRST_ROUNDS + 1)
    assert many.budget == BUDGETS[0]


def test_each_octave_of_batches_has_a_choice_of_its_own() -> None:
    choices = FanOuts()
    assert choices.of(2) is choices.of(3)
    assert choices.of(3) is not choices.of(4)
