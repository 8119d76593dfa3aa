"""The choice that pays best, against every choice there is."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence

import pytest

from services.target.control.choices import (
    NOTHING,
    Choice,
    Freedom,
    Group,
    best_choices,
    goodput_of,
)
from services.target.control.cuts import best_cut, path_survivals
from services.target.control.goodput import Device, Part, cycle
from shared.tokens import TokenTree, TreeShape

CHAINS = tuple(TreeShape(steps, 1, steps + 1) for steps in (1, 2, 3, 5))


def _flat(rows: int) -> float:
    return 0.005 + 1e-6 * rows


def _steep(rows: int) -> float:
    return 0.012 + 0.002 * rows


def _wait(per_step_s: float, hop_s: float = 0.001) -> Callable[[int, int], float]:
    return lambda steps, size: hop_s + per_step_s * steps * (1 + 0.1 * size)


def _tokens(rate: float) -> list[float]:
    return [sum(rate**level for level in range(shape.num_steps + 1)) for shape in CHAINS]


def _group(rates: Sequence[float], wait: Callable[[int, int], float], most_rows: int = 6) -> Group:
    rows = [min(shape.num_draft_tokens, most_rows) for shape in CHAINS]
    return Group(CHAINS, [_tokens(rate) for rate in rates], [rows] * len(rates), wait)


def test_plain_sequences_commit_one_token_a_step() -> None:
    assert cycle([Part(4, 4.0, 4)], _flat).goodput == pytest.approx(4 / _flat(4))


def test_a_lone_drafted_sequence_pays_its_wait_and_a_wider_step() -> None:
    round_ = cycle([Part(1, 2.5, 4, wait_s=0.003)], _flat)
    assert round_.tokens == 2.5
    assert round_.duration_s == pytest.approx(0.003 + _flat(4))


def test_others_step_while_one_waits_and_finish_the_step_they_began() -> None:
    # 12 ms of waiting is two plain steps and a bit: three of 5 ms, then one of all.
    step_s: Callable[[int], float] = lambda rows: 0.005  # noqa: E731 - a constant cost
    round_ = cycle([Part(1, 2.0, 3, wait_s=0.012), Part(2, 2.0, 2)], step_s)
    assert round_.duration_s == pytest.approx(0.020)
    assert round_.tokens == pytest.approx(2.0 + 4 * 2.0)


def test_steps_beside_a_draft_on_the_same_device_are_longer() -> None:
    step_s: Callable[[int], float] = lambda rows: 0.005  # noqa: E731 - a constant cost
    parts = [Part(1, 2.0, 3, wait_s=0.012), Part(2, 2.0, 2)]
    assert cycle(parts, step_s, slowdown=3.0).duration_s == pytest.approx(0.020)
    assert cycle(parts, step_s, slowdown=3.0).tokens == pytest.approx(2.0 + 2 * 2.0)


def test_a_free_and_right_draft_is_used_and_a_wrong_one_is_not() -> None:
    [used] = best_choices([_group([0.9] * 3, _wait(0.0001))], 0, Device(_flat))
    assert used.members == (0, 1, 2)
    [unused] = best_choices([_group([0.05] * 3, _wait(0.006))], 0, Device(_steep))
    assert unused == NOTHING


def test_only_the_sequences_that_gain_are_drafted_for() -> None:
    # A cheap hop beside a long step: waiting for one costs the others nothing but rows.
    [choice] = best_choices([_group([0.0, 0.95, 0.0], _wait(0.0001, 0.0))], 0, Device(_steep))
    assert choice.members == (1,)


def test_rows_that_are_not_verified_cost_nothing() -> None:
    wide, narrow = (_group([0.8] * 3, _wait(0.003), rows) for rows in (6, 2))
    [[of_wide], [of_narrow]] = (
        best_choices([group], 0, Device(_steep), Freedom.ALL) for group in (wide, narrow)
    )
    assert of_wide.shape is not None
    assert of_narrow.shape is not None
    assert of_wide.shape < of_narrow.shape


def test_without_leave_to_pause_the_least_bad_shape_is_chosen_for_all() -> None:
    group = _group([0.1, 0.1], _wait(0.006))
    [choice] = best_choices([group], 0, Device(_steep), Freedom.ALL)
    assert choice.members == (0, 1)
    assert choice.shape == 0


def _every_choice(group: Group) -> list[Choice]:
    sizes = range(1, len(group.tokens) + 1)
    subsets = [
        subset
        for size in sizes
        for subset in itertools.combinations(range(len(group.tokens)), size)
    ]
    return [NOTHING, *(Choice(s, m) for s in range(len(CHAINS)) for m in subsets)]


def _random_case(source: random.Random) -> tuple[Group, int, Callable[[int], float]]:
    rates = [source.random() for _ in range(source.randint(1, 5))]
    base_s, row_s = source.uniform(0.001, 0.02), source.uniform(0.0, 0.003)
    group = _group(rates, _wait(source.uniform(0.0, 0.006), source.uniform(0.0, 0.003)))
    return group, source.randint(0, 3), lambda rows: base_s + row_s * rows


@pytest.mark.parametrize("seed", range(60))
def test_the_choice_is_the_best_of_all(seed: int) -> None:
    group, num_plain, step_s = _random_case(random.Random(seed))
    chosen = best_choices([group], num_plain, Device(step_s))
    best = max(
        goodput_of([group], [choice], num_plain, Device(step_s)) for choice in _every_choice(group)
    )
    assert goodput_of([group], chosen, num_plain, Device(step_s)) == pytest.approx(best)


def test_the_oracle_can_tell_a_bad_choice() -> None:
    """Negative control: drafting for all with the deepest tree is often not the best."""
    losses = 0
    for seed in range(60):
        group, num_plain, step_s = _random_case(random.Random(seed))
        naive = Choice(len(CHAINS) - 1, tuple(range(len(group.tokens))))
        [chosen] = best_choices([group], num_plain, Device(step_s))
        rates = [goodput_of([group], [each], num_plain, Device(step_s)) for each in (naive, chosen)]
        losses += rates[0] < 0.95 * rates[1]
    assert losses > 20


@pytest.mark.parametrize("seed", range(20))
def test_choices_for_two_drafts_come_close_to_the_best_pair(seed: int) -> None:
    source = random.Random(seed)
    first, num_plain, step_s = _random_case(source)
    second, _, _ = _random_case(source)
    groups = [
        Group(CHAINS, first.tokens[:3], first.rows[:3], first.wait_s),
        Group(CHAINS, second.tokens[:3], second.rows[:3], second.wait_s),
    ]
    pairs = itertools.product(*map(_every_choice, groups))
    best = max(goodput_of(groups, pair, num_plain, Device(step_s)) for pair in pairs)
    chosen = best_choices(groups, num_plain, Device(step_s))
    assert goodput_of(groups, chosen, num_plain, Device(step_s)) > 0.9 * best


def _random_tree(source: random.Random, num_nodes: int) -> TokenTree:
    parents = tuple(source.choice([None, *range(node)]) for node in range(num_nodes))
    return TokenTree(tuple(range(num_nodes)), parents)


def _prefix_closed(tree: TokenTree) -> list[tuple[int, ...]]:
    return [
        nodes
        for size in range(len(tree) + 1)
        for nodes in itertools.combinations(range(len(tree)), size)
        if all(tree.parent_indices[node] in (None, *nodes) for node in nodes)
    ]


@pytest.mark.parametrize("seed", range(40))
def test_the_cut_is_the_best_of_all_cuts(seed: int) -> None:
    source = random.Random(seed)
    trees = [_random_tree(source, source.randint(1, 4)) for _ in range(2)]
    survivals = [path_survivals(tree, lambda *_: source.random()) for tree in trees]
    wait_s, num_rows = source.uniform(0.0, 0.02), source.randint(2, 4)
    base_s, row_s = source.uniform(0.001, 0.02), source.uniform(0.0, 0.005)

    def rate(cut: Sequence[Sequence[int]]) -> float:
        pairs = zip(survivals, cut, strict=True)
        gain = sum(of[node] for of, nodes in pairs for node in nodes)
        num_nodes = sum(map(len, cut))
        return (num_rows + gain) / (wait_s + base_s + row_s * (num_rows + num_nodes))

    cut = best_cut(survivals, num_rows, wait_s, lambda rows: base_s + row_s * rows)
    for tree, nodes in zip(trees, cut, strict=True):
        assert tuple(nodes) in _prefix_closed(tree), "a node without its parent"
    best = max(map(rate, itertools.product(*map(_prefix_closed, trees))))
    assert rate(cut) == pytest.approx(best)


def test_nothing_is_cut_where_rows_are_free_and_all_where_they_are_dear() -> None:
    survivals = [[0.5, 0.25], [0.9]]
    assert best_cut(survivals, 2, 0.0, lambda rows: 0.005) == [[0, 1], [0]]
    assert best_cut(survivals, 2, 0.0, lambda rows: 0.005 * rows) == [[], []]


def test_a_survival_is_the_product_down_the_path() -> None:
    tree = TokenTree((1, 2, 3), (None, 0, None))
    assert path_survivals(tree, lambda _, node: (0.5, 0.4, 0.3)[node]) == pytest.approx(
        [0.5, 0.2, 0.3]
    )
