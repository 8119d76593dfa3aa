"""The fan-out that commits most a second is found, and found again when that changes."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable

import pytest

from services.target.control.fan_outs import BUDGETS, FanOut, FanOuts

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


def test_each_octave_of_batches_has_a_choice_of_its_own() -> None:
    choices = FanOuts()
    assert choices.of(2) is choices.of(3)
    assert choices.of(3) is not choices.of(4)
