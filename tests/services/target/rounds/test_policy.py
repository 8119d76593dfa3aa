"""The choice for lanes, from a table of costs and acceptance that is seen."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import pytest

from services.target.adaptive_config import AdaptiveConfig, Candidates
from services.target.rounds.policy import PROBE_ROUNDS, Acceptance, LanePolicy, ShapeOrPlain
from services.target.throughput import CostTable
from shared.tokens import TreeShape

LONG, SHORT, TREE = TreeShape(5, 1, 6), TreeShape(1, 1, 2), TreeShape(5, 4, 8)
SHAPES = (TREE, LONG, SHORT)
# An 8B's on an H200, in ms by lanes: one step of plain decoding, and rounds.
PLAIN_MS = {1: 4.2, 8: 4.5, 64: 6.0, 256: 10.0}
ROUND_MS = {
    TREE: {1: 5.8, 8: 6.8, 64: 18.0, 256: 60.0},
    LONG: {1: 5.4, 8: 6.3, 64: 12.5, 256: 45.0},
    SHORT: {1: 4.7, 8: 5.0, 64: 7.5, 256: 18.0},
}


# With a 1B on another GPU, which grows chains ahead or when the verdicts are known.
CHAINS = tuple(TreeShape(steps, 1, steps + 1) for steps in (3, 5, 7))
AHEAD = tuple(replace(chain, is_ahead=True) for chain in CHAINS)
CHAIN_MS = {
    **dict(zip(CHAINS, ({1: 8.4, 8: 8.7}, {1: 10.1, 8: 11.2}, {1: 12.0, 8: 13.4}), strict=True)),
    **dict(zip(AHEAD, ({1: 4.8, 8: 5.1}, {1: 6.1, 8: 7.8}, {1: 8.1, 8: 10.5}), strict=True)),
}


def _costs(round_ms: Mapping[TreeShape, Mapping[int, float]] = ROUND_MS) -> CostTable:
    seconds = {
        shape: {size: ms / 1e3 for size, ms in times.items()} for shape, times in round_ms.items()
    }
    return CostTable({size: ms / 1e3 for size, ms in PLAIN_MS.items()}, seconds)


@dataclass
class World:
    """A device that takes what the table says, and text with an acceptance a level.

    Attributes:
        rate: probability that a level is right where the one before was, by time.
        offset_s: what each step takes beyond the table.
        own_s: what rounds of one shape take beyond that, at a number of lanes.
        beside_s: what prompts take beside every step; then no step is alone.
        costs: of the shapes that may be chosen.
    """

    rate: Callable[[float], float]
    offset_s: float = 0.0
    beside_s: float = 0.0
    own_s: Callable[[ShapeOrPlain, int], float] = lambda choice, num_lanes: 0.0
    costs: CostTable = field(default_factory=_costs)
    now_s: float = 0.0
    num_tokens: int = 0
    last: ShapeOrPlain = None

    def run(self, policy: LanePolicy, num_lanes: int, duration_s: float) -> list[ShapeOrPlain]:
        """Steps for so long; returns the choices."""
        source, costs, choices = random.Random(3), self.costs, []
        end_s = self.now_s + duration_s
        self.num_tokens = 0
        while self.now_s < end_s:
            choice = policy.choose(num_lanes, 0, tuple(costs.rounds), self.now_s)
            choices.append(choice)
            seconds = (costs.seconds(choice, num_lanes) or 0.0) + self.offset_s
            seconds += self.own_s(choice, num_lanes) + self.beside_s
            if choice is not None and choice.is_ahead and choice != self.last:
                # No trees are there yet, and the draft still works on those of the last shape.
                seconds += costs.seconds(replace(choice, is_ahead=False), num_lanes) or 0.0
            else:
                policy.observe_time(choice, num_lanes, seconds, is_alone=not self.beside_s)
            self.last = choice
            self.now_s += seconds
            self.num_tokens += num_lanes
            if choice is None:
                continue
            accepted = [self._accepted(choice, source) for _ in range(num_lanes)]
            self.num_tokens += sum(accepted)
            policy.observe(choice, is_greedy=True, accepted=accepted)
        return choices

    def run_over_plain(self, policy: LanePolicy, num_lanes: int) -> float:
        """Steps for a second; returns its throughput over that of plain steps."""
        began_s = self.now_s
        self.run(policy, num_lanes, 1.0)
        plain_rate = num_lanes / (PLAIN_MS[num_lanes] / 1e3)
        return self.num_tokens / (self.now_s - began_s) / plain_rate

    def _accepted(self, shape: TreeShape, source: random.Random) -> int:
        # A tree hits a level more often than a chain.
        rate = 1.0 - (1.0 - self.rate(self.now_s)) ** (1.5 if shape.topk > 1 else 1.0)
        count = 0
        while count < shape.num_steps and source.random() < rate:
            count += 1
        return count


def _usual(choices: list[ShapeOrPlain]) -> ShapeOrPlain:
    return max(set(choices), key=choices.count)


@pytest.mark.parametrize(
    ("num_lanes", "rate", "wanted"),
    [
        (1, 0.8, {TREE, LONG}),
        (8, 0.8, {TREE, LONG}),
        (64, 0.8, {LONG}),
        (256, 0.1, {None}),
        (1, 0.02, {None}),
    ],
)
def test_it_chooses_what_pays_within_a_second(
    num_lanes: int, rate: float, wanted: set[ShapeOrPlain]
) -> None:
    policy = LanePolicy(SHAPES, _costs())
    world = World(lambda now_s: rate)
    world.run(policy, num_lanes, 1.0)
    assert _usual(world.run(policy, num_lanes, 1.0)) in wanted


@pytest.mark.parametrize("num_lanes", [1, 64, 256])
def test_it_is_never_far_below_plain_steps(num_lanes: int) -> None:
    """Where nothing is ever accepted, all that speculation does is lost."""
    policy, world = LanePolicy(SHAPES, _costs()), World(lambda now_s: 0.0)
    world.run(policy, num_lanes, 1.0)
    for _ in range(5):
        assert world.run_over_plain(policy, num_lanes) > 0.95


@pytest.mark.parametrize("num_lanes", [1, 64])
def test_it_gives_trees_up_when_no_more_of_them_is_accepted(num_lanes: int) -> None:
    """For good: it expects nothing of levels that it does not try."""
    policy = LanePolicy(SHAPES, _costs())
    world = World(lambda now_s: 0.85 if now_s < 3.0 else 0.0)
    world.run(policy, num_lanes, 4.0)
    for _ in range(4):
        assert world.run_over_plain(policy, num_lanes) > 0.97


def test_wide_trees_come_back_when_the_text_does() -> None:
    """It probes wide trees also when it has found that chains are accepted again."""
    policy = LanePolicy(SHAPES, _costs())
    world = World(lambda now_s: 0.0 if 3.0 < now_s < 9.0 else 0.85)
    world.run(policy, 1, 10.5)
    assert _usual(world.run(policy, 1, 2.0)) == TREE


@pytest.mark.parametrize("num_lanes", [1, 8])
@pytest.mark.parametrize("rate", [0.93, 0.8])
def test_probes_cost_little_where_a_change_of_shape_costs_a_round(
    num_lanes: int, rate: float
) -> None:
    costs = _costs(CHAIN_MS)
    policy, world = LanePolicy(CHAINS + AHEAD, costs), World(lambda now_s: rate, costs=costs)
    world.run(policy, num_lanes, 2.0)
    began_s = world.now_s
    choice = _usual(world.run(policy, num_lanes, 20.0))
    assert choice in AHEAD
    num_tokens = sum(rate**level for level in range(choice.num_steps + 1))
    best_rate = num_lanes * num_tokens / (1e-3 * CHAIN_MS[choice][num_lanes])
    assert world.num_tokens / (world.now_s - began_s) > 0.97 * best_rate


def test_it_comes_back_when_the_text_changes() -> None:
    policy = LanePolicy(SHAPES, _costs())
    world = World(lambda now_s: 0.05 if now_s < 4.0 else 0.85)
    assert _usual(world.run(policy, 8, 4.0)) is None
    world.run(policy, 8, 2.0)
    assert _usual(world.run(policy, 8, 1.0)) in (TREE, LONG)


@pytest.mark.parametrize("num_unlucky", [4, 60])
def test_a_shape_is_tried_again_after_unlucky_rounds(num_unlucky: int) -> None:
    """A few rounds of one sequence say little about the text to come."""
    policy, world = LanePolicy((TREE, LONG), _costs()), World(lambda now_s: 0.9)
    for _ in range(num_unlucky):
        policy.observe(LONG, is_greedy=True, accepted=[0])
        policy.observe(TREE, is_greedy=True, accepted=[5])
    world.run(policy, 64, 8.0)
    assert _usual(world.run(policy, 64, 2.0)) == LONG


def test_it_follows_the_load_at_once() -> None:
    policy, world = LanePolicy(SHAPES, _costs()), World(lambda now_s: 0.6)
    world.run(policy, 1, 2.0)
    assert _usual(world.run(policy, 256, 1.0)) in (SHORT, None)
    assert _usual(world.run(policy, 1, 1.0)) in (TREE, LONG)


def test_what_every_step_takes_beyond_the_table_favours_long_rounds() -> None:
    """Keys and values of long contexts are read once a round, whatever it verifies."""
    short, long = (World(lambda now_s: 0.88, offset_s=offset_s) for offset_s in (0.0, 0.012))
    usual = []
    for world in (short, long):
        policy = LanePolicy((LONG, SHORT), _costs())
        world.run(policy, 256, 4.0)
        usual.append(_usual(world.run(policy, 256, 4.0)))
    assert usual == [SHORT, LONG]


def test_what_steps_take_beyond_the_table_is_known_where_prompts_come_with_each() -> None:
    """The table of empty lanes says that plain steps are faster, and there they are not."""
    empty, full = (World(lambda now_s: 0.62, offset_s, 0.002) for offset_s in (0.0, 0.01))
    usual = []
    for world in (empty, full):
        policy = LanePolicy((SHORT,), _costs())
        world.run(policy, 256, 1.0)
        usual.append(_usual(world.run(policy, 256, 4.0)))
    assert usual == [None, SHORT]


def test_one_step_alone_says_more_than_many_beside_prompts() -> None:
    policy, world = LanePolicy((SHORT,), _costs()), World(lambda now_s: 0.8)
    world.run(policy, 256, 1.0)
    for _ in range(100):
        policy.observe_time(SHORT, 256, 0.05, is_alone=False)
    assert _usual(world.run(policy, 256, 1.0)) == SHORT


def test_plain_steps_that_take_more_than_the_table_says_are_given_up_at_once() -> None:
    """The table was measured with empty lanes, where plain steps promise most."""
    policy, world = LanePolicy(SHAPES, _costs()), World(lambda now_s: 0.8, offset_s=0.006)
    world.run(policy, 64, 1.0)
    assert policy.choose(256, 0, SHAPES, world.now_s) is None
    world.run(policy, 256, 0.5)
    assert None not in world.run(policy, 256, 0.5)


def test_what_one_shape_takes_beyond_the_table_is_its_own() -> None:
    """A draft at work behind the rounds may need longer than they do, and than at start."""
    policy = LanePolicy((LONG, SHORT), _costs())
    world = World(lambda now_s: 0.6, own_s=lambda choice, _: 0.003 if choice == LONG else 0.0)
    world.run(policy, 8, 2.0)
    assert _usual(world.run(policy, 8, 2.0)) == SHORT


@pytest.mark.parametrize(
    ("num_lanes", "rate", "row_ms", "are_rounds_better"),
    [(8, 0.3, 5.0, False), (1, 0.3, 20.0, False), (8, 0.8, 0.5, True), (64, 0.8, 0.0, True)],
)
def test_rounds_whose_masks_take_longer_than_the_device_are_given_up(
    num_lanes: int, rate: float, row_ms: float, *, are_rounds_better: bool
) -> None:
    """Masks take a time for each row, of which the table knows nothing. That plain steps have fewer
    rows is known once they are tried."""

    def masks_s(choice: ShapeOrPlain, num_lanes: int) -> float:
        return row_ms / 1e3 * (1 if choice is None else choice.num_draft_tokens)

    policy, world = LanePolicy(SHAPES, _costs()), World(lambda now_s: rate, own_s=masks_s)
    first = world.run(policy, num_lanes, 5.0)
    choices = world.run(policy, num_lanes, 5.0)
    assert (_usual(choices) is not None) is are_rounds_better
    if are_rounds_better:
        assert (first + choices).count(None) <= PROBE_ROUNDS


def test_what_shapes_take_beyond_the_table_is_known_by_size() -> None:
    """A draft that keeps up with one sequence may not keep up with eight, least with long trees."""
    policy = LanePolicy((LONG, SHORT), _costs())
    beyond_s = {(LONG, 8): 0.006, (SHORT, 8): 0.001}
    world = World(lambda now_s: 0.75, own_s=lambda *of: beyond_s.get(of, 0.0))
    for _ in range(2):
        world.run(policy, 1, 2.0)
        assert _usual(world.run(policy, 1, 1.0)) == LONG
        world.run(policy, 8, 1.0)
        assert _usual(world.run(policy, 8, 1.0)) == SHORT


def test_verdicts_that_were_not_foreseen_count_for_trees_that_grow_ahead_alone() -> None:
    acceptance, ahead = Acceptance(), replace(LONG, is_ahead=True)
    acceptance.observe(LONG, is_greedy=True, accepted=[5] * 200)
    assert acceptance.tokens(ahead, is_greedy=True) > 5.0, "it promises as much until it is tried"
    acceptance.observe(ahead, is_greedy=True, accepted=[5] * 100, num_unforeseen=100)
    assert acceptance.tokens(ahead, is_greedy=True) == pytest.approx(3.5, abs=0.2)
    assert acceptance.tokens(LONG, is_greedy=True) > 5.5


def test_trees_that_grow_ahead_are_accepted_like_others() -> None:
    """Text that changes while trees of one way are tried changes what the other way promises."""
    acceptance, ahead = Acceptance(), replace(LONG, is_ahead=True)
    acceptance.observe(ahead, is_greedy=True, accepted=[0] * 60)
    assert acceptance.tokens(ahead, is_greedy=True) < 1.1
    for _ in range(50):
        acceptance.observe(LONG, is_greedy=True, accepted=[5])
    assert acceptance.tokens(ahead, is_greedy=True) > 3.5


def test_a_stall_of_one_round_does_not_rule_its_shape_out() -> None:
    policy, world = LanePolicy((LONG, SHORT), _costs()), World(lambda now_s: 0.6)
    policy.observe_time(SHORT, 64, 0.05)
    world.run(policy, 64, 1.0)
    assert _usual(world.run(policy, 64, 1.0)) == SHORT


def test_depths_that_an_operator_left_out_are_never_chosen() -> None:
    config = AdaptiveConfig({1: Candidates(steps=(1,), may_pause=False)})
    policy = LanePolicy(SHAPES, _costs(), config)
    choices = World(lambda now_s: 0.9).run(policy, 8, 1.0)
    assert set(choices[1:]) == {SHORT}


def test_acceptance_of_a_breadth_that_was_not_tried_is_that_of_the_next_one() -> None:
    acceptance = Acceptance()
    wide, narrow = TreeShape(2, 16, 17), TreeShape(2, 8, 9)
    acceptance.observe(wide, is_greedy=True, accepted=[2] * 200)
    acceptance.observe(SHORT, is_greedy=True, accepted=[0] * 200)
    assert acceptance.tokens(narrow, is_greedy=True) > 2.8
    assert acceptance.tokens(LONG, is_greedy=True) < 1.2
    assert acceptance.tokens(wide, is_greedy=False) == pytest.approx(1 + 0.75 + 0.75**2)
