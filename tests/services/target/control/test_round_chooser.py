"""Rounds are chosen where they pay, by the clock of a cost model, and plain steps elsewhere."""

from __future__ import annotations

from dataclasses import replace

import pytest

from services.target.control.adaptive_config import AdaptiveConfig, Candidates
from services.target.control.probe_budget import PROBE_SHARE
from tests.bench.round_choice import (
    LONG,
    MIDDLE,
    SHORT,
    TREE,
    best_fixed,
    fixed_rate,
    plain_rate,
    world,
)
from tests.helpers.round_world import Simulation

NEARLY = 0.95
"""Of plain decoding's speed, while everything is learnt anew for a size of batch."""


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("chain", "tree"), [(0.0, 0.0), (0.3, 0.4), (0.6, 0.75), (0.8, 0.88)])
def test_it_is_never_below_plain_and_comes_close_to_the_best_choice(
    chain: float, tree: float, seed: int
) -> None:
    served = world(chain, tree)
    simulation = Simulation(served, seed=seed)
    for num_sequences in (1, 8, 16, 64, 32):
        simulation.serve(num_sequences, 3.0)
        assert simulation.rate > NEARLY * plain_rate(num_sequences)
    for num_sequences in (64, 8, 1):
        simulation.serve(num_sequences, 3.0)
        assert simulation.rate > 0.97 * plain_rate(num_sequences)
        assert simulation.rate > 0.88 * best_fixed(served, num_sequences)[1]


def test_the_shape_changes_with_the_batch() -> None:
    simulation = Simulation(world(0.6, 0.75))
    usual = []
    for num_sequences in (1, 8, 64):
        simulation.serve(num_sequences, 3.0)
        usual.append(simulation.used.most_common(1)[0][0])
    assert usual[0] == TREE
    assert set(usual[1:]) <= {LONG, MIDDLE}


def test_the_draft_s_own_shape_shows_what_a_fixed_choice_costs() -> None:
    """Negative control: the world tells good choices from bad ones."""
    served = world(0.3, 0.4)
    assert fixed_rate(served, TREE, 16) < 0.6 * plain_rate(16)
    assert fixed_rate(served, TREE, 1) > 1.2 * plain_rate(1)


def test_a_change_of_text_is_followed() -> None:
    """From 3 s to 6 s nothing is accepted."""
    served = replace(
        world(0.0, 0.0), right=lambda shape, now_s: 0.0 if 3.0 <= now_s < 6.0 else 0.75
    )
    simulation = Simulation(served)
    simulation.serve(8, 3.0)
    assert simulation.rate > 1.7 * plain_rate(8)
    simulation.serve(8, 3.0)
    assert simulation.rate > 0.85 * plain_rate(8)
    assert simulation.used.most_common(1)[0][0] is None
    simulation.serve(8, 2.0)
    simulation.serve(8, 2.0)
    assert simulation.rate > 1.7 * plain_rate(8), "a probe has found that rounds pay again"


def test_probes_take_no_more_than_their_share() -> None:
    simulation = Simulation(world(0.0, 0.0))
    simulation.serve(16, 4.0)
    simulation.serve(16, 20.0)
    assert simulation.rate > (1 - 2 * PROBE_SHARE) * plain_rate(16)
    assert 0 < simulation.used.total() - simulation.used[None] < 0.1 * simulation.used.total()


def test_where_other_work_comes_between_rounds_bear_their_beginning() -> None:
    """To begin with rounds takes two plain steps here; in runs of three it does not pay."""
    served = replace(world(0.4, 0.5), entry_s=0.01)
    simulation = Simulation(served)
    for _ in range(2):
        simulation.serve(8, 3.0, run_length=3)
    assert simulation.rate > NEARLY * plain_rate(8)
    assert simulation.used.most_common(1)[0][0] is None
    simulation.serve(8, 3.0, run_length=400)
    simulation.serve(8, 3.0, run_length=400)
    assert simulation.used.most_common(1)[0][0] is not None


def test_plain_steps_are_left_out_where_the_config_says_so() -> None:
    config = AdaptiveConfig({1: Candidates(steps=(3, 5), may_pause=False)})
    simulation = Simulation(world(0.0, 0.0), config)
    simulation.serve(8, 1.0)
    assert set(simulation.used) <= {TREE, LONG, MIDDLE}
    assert MIDDLE in simulation.used


def test_the_config_chooses_by_size_of_batch() -> None:
    config = AdaptiveConfig({1: Candidates(steps=(5,)), 8: Candidates(steps=(1,))})
    simulation = Simulation(world(0.8, 0.9), config)
    simulation.serve(1, 1.0)
    assert set(simulation.used) <= {TREE, LONG, None}
    simulation.serve(8, 1.0)
    assert set(simulation.used) <= {SHORT, None}


def test_the_draft_s_own_shape_warms_up() -> None:
    config = AdaptiveConfig({1: Candidates(num_warm_up_rounds=400)})
    simulation = Simulation(world(0.0, 0.0), config)
    simulation.serve(4, 0.5)
    assert set(simulation.used) == {TREE}
    simulation.serve(4, 4.0)
    assert simulation.used.most_common(1)[0][0] is None
