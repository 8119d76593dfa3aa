"""What drafts are asked for follows from what rounds took and brought."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable
from dataclasses import dataclass

import pytest

from services.target.adaptive_config import DEFAULT_CONFIG, AdaptiveConfig, Candidates, chain
from services.target.drafts.draft_policy import (
    ALLOWANCE_S,
    ALWAYS,
    COLD_STEPS,
    FEWEST_ROUNDS,
    IDLE_S,
    LAST_PAUSE_S,
    MOST_COST_S,
    TREES_A_WAIT,
    TRIAL_SHARE,
    DraftPolicy,
    Rounds,
    RoundTimes,
)
from services.target.throughput import FORGET_S, CostTable
from shared.tokens import ANY_TREE, NO_TREE, ShapeOrPlain, TreeRequest, TreeShape

BASE = chain(3)
PLAIN_S = 0.01


def _step(rounds: Rounds, seconds: float, num_rounds: int = 1) -> None:
    policy = DraftPolicy(BASE)
    for _ in range(num_rounds):
        policy.observe_round(None, 1, seconds, has_tree=False)
    rounds.add(policy._step[None])


@dataclass
class World:
    """Serves sequences for a while and notes what was chosen.

    Attributes:
        right: chance that a level is accepted; all sequences fare alike.
        tree_s: what a tree adds to a round, by depth.
    """

    policy: DraftPolicy
    right: float
    tree_s: Callable[[int], float]
    now_s: float = 0.0
    num_tokens: float = 0.0
    num_sequences: int = 4
    num_reading: int = 0

    def __post_init__(self) -> None:
        self._source = random.Random(5)

    def _num_accepted(self, depth: int) -> int:
        right = (self._source.random() < self.right for _ in range(depth))
        return sum(itertools.takewhile(bool, right))

    def serve(self, seconds: float) -> float:
        """Returns the tokens a second of one sequence."""
        start_s, before = self.now_s, self.num_tokens
        while self.now_s < start_s + seconds:
            self._round(self.policy.current)
        return (self.num_tokens - before) / (self.now_s - start_s)

    def _round(self, choice: ShapeOrPlain) -> None:
        depth = 0 if choice is None else choice.num_steps
        accepted = [self._num_accepted(depth) for _ in range(self.num_sequences)]
        round_s = PLAIN_S + (self.tree_s(depth) if depth else 0.0)
        self.now_s += round_s
        for count in accepted:
            self.policy.observe_round(choice, 1 + count, round_s, has_tree=choice is not None)
            if choice is not None:
                self.policy.observe_accepted(choice, count)
        self.num_tokens += 1 + sum(accepted) / len(accepted)
        self.policy.turn(self.num_sequences, self.now_s, self.num_reading)


def _cheap(depth: int) -> float:
    return 0.001 * depth


def _dear(depth: int) -> float:
    return 0.05 * depth


def test_trees_stay_where_they_are_faster() -> None:
    world = World(DraftPolicy(BASE), 0.75, _cheap)
    assert world.serve(4.0) > 0.93 * (1 + 0.75 + 0.75**2 + 0.75**3) / (PLAIN_S + _cheap(3))
    assert world.policy.choice == BASE
    assert world.policy.pays is True


def test_whether_trees_are_faster_is_unknown_before_one_was_verified() -> None:
    policy = DraftPolicy(BASE)
    for number in range(FEWEST_ROUNDS):
        policy.observe_round(None, 1, PLAIN_S, has_tree=False)
        policy.turn(1, (1 + number) * PLAIN_S)
    assert policy.choice == BASE
    assert policy.pays is None
    assert policy.comparison() == "measured with 1 sequence: plain steps 100 tokens/s"


def test_plain_steps_replace_trees_that_are_slower() -> None:
    world = World(DraftPolicy(BASE), 0.75, _dear)
    world.serve(2.0)
    assert world.policy.choice is None
    assert world.policy.pays is False
    assert world.serve(20.0) > 0.95 / PLAIN_S, "trials included"


def test_what_an_operator_insists_on_stays() -> None:
    """Negative control of the test before."""
    world = World(DraftPolicy(BASE, always_up_to=ALWAYS), 0.75, _dear)
    world.serve(2.0)
    assert world.policy.current == BASE
    assert not world.policy.is_trying
    assert world.policy.pays is None


def test_what_an_operator_insists_on_for_few_is_chosen_for_many() -> None:
    world = World(DraftPolicy(BASE, always_up_to=1), 0.75, _dear)
    world.serve(2.0)
    assert world.policy.choice is None
    world.num_sequences = 1
    world.serve(0.1)
    assert (world.policy.current, world.policy.pays) == (BASE, None)


def test_what_is_known_of_a_load_holds_at_once_when_it_is_back() -> None:
    world = World(DraftPolicy(BASE), 0.75, _cheap, num_sequences=1)
    world.serve(4.0)
    for _ in range(2):
        world.num_sequences, world.tree_s = 16, _dear
        world.serve(4.0)
        assert world.policy.choice is None
        world.num_sequences, world.tree_s = 1, _cheap
        world.serve(LAST_PAUSE_S)
        assert world.policy.choice == BASE
    world.num_sequences, world.tree_s = 16, _dear
    world.serve(2 * (PLAIN_S + _dear(3)))
    assert world.policy.choice is None


def test_it_decides_where_prompts_are_always_read() -> None:
    world = World(DraftPolicy(BASE), 0.75, _dear, num_sequences=8, num_reading=4)
    world.serve(4.0)
    assert world.policy.choice is None


def test_those_whose_prompts_are_read_count() -> None:
    """A draft is not made to read the prompts of a burst for trees that will not be wanted."""
    world = World(DraftPolicy(BASE), 0.75, _dear, num_sequences=16)
    world.serve(4.0)
    world.num_sequences, world.tree_s = 1, _cheap
    world.serve(LAST_PAUSE_S)
    assert world.policy.current == BASE
    world.policy.turn(1, world.now_s, num_reading=15)
    assert world.policy.current is None


def test_trees_come_back_once_they_are_faster() -> None:
    world = World(DraftPolicy(BASE), 0.75, _dear)
    world.serve(4.0)
    assert world.policy.choice is None
    world.tree_s = _cheap
    world.serve(LAST_PAUSE_S)
    assert world.policy.choice == BASE


def test_plain_steps_come_within_a_second_once_they_are_faster() -> None:
    world = World(DraftPolicy(BASE), 0.75, _cheap)
    world.serve(4.0)
    world.tree_s = _dear
    world.serve(1.0)
    assert world.policy.choice is None


def test_trials_cost_a_small_share_of_the_time() -> None:
    world = World(DraftPolicy(BASE), 0.0, _dear)
    world.serve(4.0)
    before_s = world.policy.trial_s
    world.serve(60.0)
    cost_s = world.policy.trial_s - before_s
    assert 0.0 < cost_s < 2 * TRIAL_SHARE * 60.0 + ALLOWANCE_S


def _dear_above_eight(world: World) -> Callable[[int], float]:
    """Trees cost little up to eight sequences, and much above."""
    return lambda depth: _dear(depth) if world.num_sequences > 8 else _cheap(depth)


@pytest.mark.parametrize("cost_s", [0.0, 3.0])
def test_a_change_of_load_is_followed_at_once_whatever_trials_have_cost(cost_s: float) -> None:
    """Plain steps were measured with few sequences only, and no trial is due."""
    world = World(DraftPolicy(BASE), 0.75, _cheap)
    world.tree_s = _dear_above_eight(world)
    world.serve(4.0)
    assert world.policy.choice == BASE
    world.policy.trial_s += cost_s
    world.policy._may_try_s += cost_s / TRIAL_SHARE
    world.num_sequences = 64
    world.serve(2.0)
    assert world.policy.choice is None
    world.num_sequences = 4
    world.serve(1.0)
    assert world.policy.choice == BASE


@pytest.mark.parametrize(("right", "depths"), [(0.3, {1}), (0.95, {5, 7})])
def test_a_depth_is_chosen_by_what_is_accepted(right: float, depths: set[int]) -> None:
    config = AdaptiveConfig({1: Candidates(steps=(1, 3, 5, 7))})
    world = World(DraftPolicy(BASE, config), right, lambda depth: 0.001 * depth)
    world.serve(10.0)
    assert world.policy.choice is not None
    assert world.policy.choice.num_steps in depths


def test_without_a_config_a_draft_keeps_its_own_shape() -> None:
    world, seen = World(DraftPolicy(BASE), 0.95, _cheap), set[ShapeOrPlain]()
    while world.now_s < 4.0:
        world.serve(0.01)
        seen.add(world.policy.current)
    assert seen == {BASE, None}


def test_a_pinned_draft_is_asked_for_its_own_shape_or_none() -> None:
    policy = DraftPolicy(BASE, DEFAULT_CONFIG, is_pinned=True)
    world, seen = World(policy, 0.95, _cheap), set[ShapeOrPlain]()
    while world.now_s < 4.0:
        world.serve(0.01)
        seen.add(world.policy.current)
    assert seen == {BASE, None}


def test_a_config_without_plain_steps_has_none() -> None:
    config = AdaptiveConfig({1: Candidates(steps=(1, 3), may_pause=False)})
    world, seen = World(DraftPolicy(BASE, config), 0.0, _dear), set[ShapeOrPlain]()
    while world.now_s < 10.0:
        world.serve(0.01)
        seen.add(world.policy.current)
    assert seen == {chain(1), BASE}
    assert world.policy.choice == chain(1)


@pytest.mark.parametrize(("num_sequences", "choice"), [(1, BASE), (16, None)])
def test_a_trial_ends_where_the_number_of_sequences_allows_one_choice(
    num_sequences: int, choice: ShapeOrPlain
) -> None:
    """Trees always, or never: whatever is on trial for 4 sequences."""
    may_pause = {"steps": (3,), "may_pause": True}
    config = AdaptiveConfig({
        1: Candidates(steps=(3,)),
        2: Candidates(**may_pause),
        8: Candidates(steps=(), may_pause=True),
    })  # fmt: skip
    world = World(DraftPolicy(BASE, config), 0.75, _cheap)
    while world.policy.current is choice or not world.policy.is_trying:
        # Plain steps are tried while trees are chosen, trees while plain steps are.
        world.tree_s = _cheap if choice is not None else _dear
        world.serve(0.01)
        assert world.now_s < 60.0
    world.num_sequences = num_sequences
    world.serve(1.0)
    assert not world.policy.is_trying
    assert world.policy.current == choice


def test_what_a_number_of_sequences_does_not_allow_is_left_at_once() -> None:
    config = AdaptiveConfig({1: Candidates(steps=(3,)), 8: Candidates(steps=(), may_pause=True)})
    world = World(DraftPolicy(BASE, config), 0.75, _cheap)
    world.serve(0.2)
    assert world.policy.choice == BASE
    world.num_sequences = 8
    world.serve(0.05)
    assert world.policy.current is None


def test_tree_requests_say_what_is_chosen() -> None:
    policy = DraftPolicy(BASE, DEFAULT_CONFIG)
    assert policy.tree_request == ANY_TREE
    policy.choice = chain(5)
    assert policy.tree_request == TreeRequest(chain(5))
    policy.choice = None
    assert policy.tree_request == NO_TREE
    assert policy.current is None


def _pauses_s(
    policy: DraftPolicy, num_sequences: int, duration_s: float, *, steps_a_trial_step: int
) -> list[float]:
    """Takes plain steps, and trials in which no draft answers; returns the times between the
    beginnings of trials.

    Args:
        steps_a_trial_step: how many plain steps a step of a trial takes as long as.
    """
    now_s, began_s, was_trying = 0.0, list[float](), False
    policy.choice = None
    while now_s < duration_s:
        now_s += PLAIN_S * (steps_a_trial_step if policy.is_trying else 1)
        for _ in range(num_sequences):
            if policy.is_trying:
                policy.observe_excused(1)
            else:
                policy.observe_round(None, 1, PLAIN_S, has_tree=False)
        policy.turn(num_sequences, now_s)
        if policy.is_trying and not was_trying:
            began_s.append(now_s)
        was_trying = policy.is_trying
    assert policy.choice is None
    return [after - before for before, after in itertools.pairwise(began_s)]


def test_a_trial_ends_though_no_draft_answers_in_it() -> None:
    pauses_s = _pauses_s(DraftPolicy(BASE), 1, 30.0, steps_a_trial_step=1)
    assert pauses_s
    assert pauses_s[-1] > 4 * pauses_s[0], "ever rarer"


def test_trials_in_which_a_draft_only_reads_prompts_become_rare() -> None:
    """Each takes the time of many plain steps, and ends before the draft has sent a tree."""
    policy = DraftPolicy(BASE)
    pauses_s = _pauses_s(policy, 16, 100.0, steps_a_trial_step=20)
    assert pauses_s[-1] > 0.9 * LAST_PAUSE_S
    assert policy.trial_s < TRIAL_SHARE * 100.0


def test_a_trial_that_costs_too_much_ends_at_once() -> None:
    """Its draft compiles kernels, so that every round waits in vain."""
    world = World(DraftPolicy(BASE), 0.75, _dear)
    world.serve(4.0)
    policy, now_s = world.policy, world.now_s
    assert policy.choice is None
    while not policy.is_trying:
        now_s += PLAIN_S
        policy.observe_round(None, 1, PLAIN_S, has_tree=False)
        policy.turn(4, now_s)
    began_s = now_s
    while policy.is_trying:
        now_s += 0.08
        policy.observe_excused(4)
        policy.turn(4, now_s)
    assert now_s - began_s < MOST_COST_S + 2 * 0.08
    assert policy.choice is None


def test_a_step_that_captured_graphs_is_disregarded() -> None:
    policy = DraftPolicy(BASE)
    for is_void in (True, False):
        if is_void:
            policy.disregard()
        policy.observe_round(None, 1, 9.0, has_tree=False)
        policy.turn(1, 1.0)
        assert bool(policy.times.measured()) is not is_void


def test_capturing_graphs_costs_a_trial_nothing() -> None:
    world = World(DraftPolicy(BASE), 0.75, _dear)
    while not world.policy.is_trying:
        world.serve(0.0001)
    before_s = world.policy.trial_s
    world.policy.disregard()
    world.now_s += 0.8 * IDLE_S
    while world.policy.is_trying:
        world.serve(0.0001)
    assert world.policy.trial_s - before_s < MOST_COST_S


def test_trees_that_never_come_are_no_choice() -> None:
    """Rounds without them are about as fast as plain steps, but no faster."""
    policy, now_s = DraftPolicy(BASE), 0.0
    for _ in range(COLD_STEPS + FEWEST_ROUNDS):
        now_s += PLAIN_S
        policy.observe_round(BASE, 1, PLAIN_S, has_tree=False)
        policy.turn(1, now_s)
    assert policy.choice is None


def test_a_trial_ends_where_the_draft_sends_other_trees() -> None:
    """It has yet to prepare the shape on trial."""
    config = AdaptiveConfig({1: Candidates(steps=(3, 5), may_pause=False)})
    policy, now_s, num_rounds = DraftPolicy(BASE, config), 0.0, 0
    while not policy.is_trying:
        now_s += PLAIN_S
        policy.observe_round(BASE, 3, PLAIN_S, has_tree=True)
        policy.turn(1, now_s)
    while policy.is_trying:
        now_s, num_rounds = now_s + PLAIN_S, num_rounds + 1
        policy.observe_round(BASE, 3, PLAIN_S, has_tree=True)
        policy.turn(1, now_s)
    assert num_rounds <= 2 * FEWEST_ROUNDS


def test_the_first_steps_are_not_measured() -> None:
    policy = DraftPolicy(BASE)
    for seconds in [9.0] * COLD_STEPS + [0.01] * 3:
        policy.observe_round(BASE, 3, seconds, has_tree=True)
        policy.turn(1, 1.0)
    assert policy.times.measured() == {(BASE, 1): pytest.approx(0.01)}


def test_waiting_for_a_tree_pays_as_long_as_the_plain_steps_that_it_replaces() -> None:
    policy = DraftPolicy(BASE)
    policy.turn(4, 1.0)
    assert policy.worthwhile_wait_s == math.inf, "plain steps were never measured"
    policy.costs.plain[4] = PLAIN_S
    policy.turn(4, 1.1)
    assert policy.worthwhile_wait_s == pytest.approx(TREES_A_WAIT * 3 * PLAIN_S)
    policy.always_up_to = 4
    policy.turn(4, 1.2)
    assert policy.worthwhile_wait_s == math.inf, "trees are wanted at any price"


def test_figures_are_in_the_comparison() -> None:
    world = World(DraftPolicy(BASE), 0.75, _cheap)
    world.serve(2.0)
    text = world.policy.comparison()
    assert text.startswith("measured with 4 sequences: plain steps 400 tokens/s, the best trees")
    assert "(3 deep, 1 wide)" in text


def test_one_stall_moves_an_average_little() -> None:
    rounds = Rounds()
    for _ in range(7):
        _step(rounds, 0.01)
    _step(rounds, 1.0)
    assert rounds.mean is not None
    assert rounds.mean.seconds == pytest.approx(0.01 * (7 + 3) / 8)


def test_steps_weigh_by_their_rounds() -> None:
    rounds = Rounds()
    _step(rounds, 0.02, num_rounds=9)
    _step(rounds, 0.01, num_rounds=1)
    assert rounds.mean is not None
    assert rounds.mean.seconds == pytest.approx(0.019)


def test_averages_that_were_cleared_hold_until_the_next_round() -> None:
    rounds = Rounds()
    _step(rounds, 0.5)
    before = rounds.mean
    rounds.clear()
    assert (len(rounds), rounds.mean) == (0, before)
    _step(rounds, 0.1)
    assert rounds.mean is not None
    assert rounds.mean.seconds == 0.1


def test_times_of_another_number_of_sequences_are_scaled() -> None:
    times = RoundTimes()
    assert times.estimate(None, 4, BASE) is None
    _step(times.at(None, 1), 0.01)
    _step(times.at(BASE, 1), 0.02)
    _step(times.at(BASE, 64), 0.06)
    scaled = times.estimate(None, 64, BASE)
    assert scaled is not None
    assert scaled.seconds == pytest.approx(0.03)
    alone = times.estimate(None, 8, BASE)
    assert alone is not None
    assert alone.seconds == 0.01, "nothing says how that differs"


def test_what_was_not_seen_for_long_is_tried_again() -> None:
    policy = DraftPolicy(BASE)
    policy._seen_s[BASE] = 0.0
    _step(policy.times.at(BASE, 1), 1.0)
    young, old = (policy._hope(BASE, 1, now_s) for now_s in (0.0, FORGET_S))
    assert old == pytest.approx(2.0 * young)


def test_a_trial_takes_few_rounds() -> None:
    world = World(DraftPolicy(BASE), 0.75, _cheap)
    while not world.policy.is_trying:
        world.serve(0.001)
    began_s = world.now_s
    while world.policy.is_trying:
        world.serve(0.001)
    assert world.now_s - began_s < 2.0 * FEWEST_ROUNDS * PLAIN_S


def test_a_shape_of_a_breadth_that_is_unknown_is_tried() -> None:
    tree = TreeShape(3, 4, 9)
    config = AdaptiveConfig({1: Candidates(steps=(3,))})
    world, seen = World(DraftPolicy(tree, config), 0.75, _cheap), set[ShapeOrPlain]()
    while world.now_s < 4.0:
        world.serve(0.01)
        seen.add(world.policy.current)
    assert seen == {tree, chain(3), None}


@pytest.mark.parametrize("is_told", [True, False], ids=["told", "negative control"])
def test_time_in_which_nobody_decodes_costs_a_trial_nothing(*, is_told: bool) -> None:
    world = World(DraftPolicy(BASE), 0.75, _dear)
    while not world.policy.is_trying:
        world.serve(0.0001)
    gap_s = 0.8 * IDLE_S
    assert gap_s > MOST_COST_S
    if is_told:  # the last sequence has ended
        world.policy.turn(0, world.now_s)
    world.now_s += gap_s
    before_s = world.policy.trial_s
    while world.policy.is_trying:
        world.serve(0.0001)
    assert (world.policy.trial_s - before_s < MOST_COST_S) is is_told


def test_plain_steps_that_were_measured_at_start_need_no_trial() -> None:
    """The load rises, and trees cost more than with a few."""
    took_s: list[float] = []
    for costs in (CostTable({1: PLAIN_S, 64: PLAIN_S}), CostTable()):
        policy = DraftPolicy(BASE, DEFAULT_CONFIG, costs=costs)
        world = World(policy, 0.75, _cheap, num_sequences=1)
        world.serve(20.0)
        assert policy.choice is not None
        world.num_sequences, world.tree_s, began_s = 32, _dear, world.now_s
        while policy.choice is not None:
            world.serve(0.0001)
        took_s.append(world.now_s - began_s)
    told_s, untold_s = took_s
    assert told_s < 0.6 * untold_s
