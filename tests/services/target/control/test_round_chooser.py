"""Rounds are chosen where they pay, by the clock of a cost model, and plain steps elsewhere."""

from __future__ import annotations

from dataclasses import replace

import pytest

from services.target.control.adaptive_config import AdaptiveConfig, Candidates
from services.target.control.probe_budget import PROBE_SHARE
from shared.tokens import TreeShape
from tests.helpers.round_world import Simulation, World

TREE = TreeShape(5, 8, 32)
LONG, MIDDLE, SHORT = TreeShape(5, 1, 6), TreeShape(3, 1, 4), TreeShape(1, 1, 2)
CAPACITIES = {TREE: 16, LONG: 64, MIDDLE: 64, SHORT: 64}
NEARLY = 0.95
"""Of plain decoding's speed, while everything is learnt anew for a size of batch."""


def _plain_s(num_sequences: int) -> float:
    """An 8B on a GPU."""
    return 0.0045 + 0.00003 * num_sequences


def _round_s(shape: TreeShape, num_sequences: int) -> float:
    """Rows are nearly free up to 64; then they cost."""
    num_rows = num_sequences * (1 + shape.max_node_count)
    verify_s = 0.0045 + 0.0000125 * num_rows + 0.00004 * max(num_rows - 64, 0)
    return verify_s + 0.0003 * shape.num_steps * (1 + 0.02 * num_sequences) + 0.0003


def _world(chain: float, tree: float) -> World:
    """A head that gets each level of chains and of trees right that often."""
    return World(
        _plain_s, _round_s, lambda shape, now_s: tree if shape.topk > 1 else chain, CAPACITIES
    )


def _plain_rate(num_sequences: int) -> float:
    return num_sequences / _plain_s(num_sequences)


def _rate(world: World, shape: TreeShape, num_sequences: int) -> float:
    right = world.right(shape, 0.0)
    tokens = sum(right**level for level in range(shape.num_steps + 1))
    return num_sequences * tokens / _round_s(shape, num_sequences)


def _best_rate(world: World, num_sequences: int) -> float:
    shapes = [shape for shape, most in CAPACITIES.items() if most >= num_sequences]
    rates = [_rate(world, shape, num_sequences) for shape in shapes]
    return max(*rates, _plain_rate(num_sequences))


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("chain", "tree"), [(0.0, 0.0), (0.3, 0.4), (0.6, 0.75), (0.8, 0.88)])
def test_it_is_never_below_plain_and_comes_close_to_the_best_choice(
    chain: float, tree: float, seed: int
) -> None:
    world = _world(chain, tree)
    simulation = Simulation(world, seed=seed)
    for num_sequences in (1, 8, 16, 64, 32):
        simulation.serve(num_sequences, 3.0)
        assert simulation.rate > NEARLY * _plain_rate(num_sequences)
    for num_sequences in (64, 8, 1):
        simulation.serve(num_sequences, 3.0)
        assert simulation.rate > 0.97 * _plain_rate(num_sequences)
        assert simulation.rate > 0.88 * _best_rate(world, num_sequences)


def test_the_shape_changes_with_the_batch() -> None:
    simulation = Simulation(_world(0.6, 0.75))
    usual = []
    for num_sequences in (1, 16, 64):
        simulation.serve(num_sequences, 3.0)
        usual.append(simulation.used.most_common(1)[0][0])
    assert usual == [TREE, MIDDLE, SHORT]


def test_the_draft_s_own_shape_shows_what_a_fixed_choice_costs() -> None:
    """Negative control: the world tells good choices from bad ones."""
    world = _world(0.3, 0.4)
    assert _rate(world, LONG, 64) < 0.6 * _plain_rate(64)
    assert _rate(world, TREE, 16) < 0.6 * _plain_rate(16)


def test_a_change_of_text_is_followed() -> None:
    """From 3 s to 6 s nothing is accepted."""
    world = replace(
        _world(0.0, 0.0), right=lambda shape, now_s: 0.0 if 3.0 <= now_s < 6.0 else 0.75
    )
    simulation = Simulation(world)
    simulation.serve(8, 3.0)
    assert simulation.rate > 1.7 * _plain_rate(8)
    simulation.serve(8, 3.0)
    assert simulation.rate > 0.85 * _plain_rate(8)
    assert simulation.used.most_common(1)[0][0] is None
    simulation.serve(8, 2.0)
    simulation.serve(8, 2.0)
    assert simulation.rate > 1.7 * _plain_rate(8), "a probe has found that rounds pay again"


def test_probes_take_no_more_than_their_share() -> None:
    simulation = Simulation(_world(0.0, 0.0))
    simulation.serve(16, 4.0)
    simulation.serve(16, 20.0)
    assert simulation.rate > (1 - 2 * PROBE_SHARE) * _plain_rate(16)
    assert 0 < simulation.used.total() - simulation.used[None] < 0.05 * simulation.used.total()


def test_where_other_work_comes_between_rounds_bear_their_beginning() -> None:
    """To begin with rounds takes two plain steps here; in runs of three it does not pay."""
    world = replace(_world(0.4, 0.5), entry_s=0.01)
    simulation = Simulation(world)
    for _ in range(2):
        simulation.serve(8, 3.0, run_length=3)
    assert simulation.rate > NEARLY * _plain_rate(8)
    assert simulation.used.most_common(1)[0][0] is None
    simulation.serve(8, 3.0, run_length=400)
    simulation.serve(8, 3.0, run_length=400)
    assert simulation.used.most_common(1)[0][0] is not None


def test_plain_steps_are_left_out_where_the_config_says_so() -> None:
    config = AdaptiveConfig({1: Candidates(steps=(3, 5), may_pause=False)})
    simulation = Simulation(_world(0.0, 0.0), config)
    simulation.serve(8, 1.0)
    assert set(simulation.used) <= {TREE, LONG, MIDDLE}
    assert MIDDLE in simulation.used


def test_the_config_chooses_by_size_of_batch() -> None:
    config = AdaptiveConfig({1: Candidates(steps=(5,)), 8: Candidates(steps=(1,))})
    simulation = Simulation(_world(0.8, 0.9), config)
    simulation.serve(1, 1.0)
    assert set(simulation.used) <= {TREE, LONG, None}
    simulation.serve(8, 1.0)
    assert set(simulation.used) <= {SHORT, None}


def test_the_draft_s_own_shape_warms_up() -> None:
    config = AdaptiveConfig({1: Candidates(num_warm_up_rounds=400)})
    simulation = Simulation(_world(0.0, 0.0), config)
    simulation.serve(4, 0.5)
    assert set(simulation.used) == {TREE}
    simulation.serve(4, 4.0)
    assert simulation.used.most_common(1)[0][0] is None
