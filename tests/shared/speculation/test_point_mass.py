"""The point-mass rule: exact by enumeration, by statistics, and at the edges of rounding."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction

import pytest
import torch

from shared.errors import InvalidArgument
from shared.speculation.verify import (
    EXACT,
    PointMassDraws,
    Thresholds,
    accept_point_mass,
    point_mass_draws,
)
from shared.tokens import EMPTY_TREE, TokenTree
from tests.shared.speculation.naive import chi_square_p_value, every_tree, row_contexts

Context = tuple[int, ...]
ExactDistribution = tuple[Fraction, ...]
# Sixteenths are exact in float64, so the enumeration has no rounding anywhere.
SIXTEENTHS = ((7, 4, 5), (0, 10, 6), (1, 0, 15), (8, 8, 0), (3, 12, 1), (16, 0, 0))


def exact_distribution(context: Context) -> ExactDistribution:
    index = sum((token + 1) * 4**i for i, token in enumerate(context))
    return tuple(Fraction(n, 16) for n in SIXTEENTHS[index % len(SIXTEENTHS)])


def row_children(tree: TokenTree) -> list[list[int]]:
    children: list[list[int]] = [[] for _ in range(len(tree) + 1)]
    for node, parent in enumerate(tree.parent_indices):
        children[0 if parent is None else parent + 1].append(node)
    return children


def coin_intervals(probs: Sequence[Fraction], acc: Fraction) -> list[tuple[Fraction, Fraction]]:
    """(midpoint, length) of the pieces of the unit interval on which the walk is constant."""
    sums = itertools.accumulate(probs)
    borders = sorted({Fraction(0), Fraction(1), *(min(s / acc, Fraction(1)) for s in sums)})
    return [((low + high) / 2, high - low) for low, high in itertools.pairwise(borders)]


def enumerated(tree: TokenTree, thresholds: Thresholds) -> Iterator[tuple[Context, Fraction, int]]:
    """Every outcome of the coins: accepted tokens, its probability, and the row it ends at."""
    contexts, children = row_contexts(tree), row_children(tree)
    distributions = [exact_distribution(context) for context in contexts]
    node_probs: list[Fraction] = [Fraction(0)] * len(tree)
    for row, nodes in enumerate(children):
        for node in nodes:
            node_probs[node] = distributions[row][tree.token_ids[node]]
    has_residual = [sum(residual_distribution(tree, row)) > 0 for row in range(len(tree) + 1)]
    pieces = [
        coin_intervals([node_probs[n] for n in nodes], Fraction(thresholds.acc))
        for nodes in children
    ]
    for coins in itertools.product(*pieces):
        draws = PointMassDraws(
            node_probs=tuple(float(p) for p in node_probs),
            # The row's own number stands for its bonus, whose distribution is known apart.
            residual_token_ids=tuple(row if ok else None for row, ok in enumerate(has_residual)),
            coins=tuple(float(middle) for middle, _ in coins),
        )
        path = accept_point_mass(tree, draws, thresholds)
        accepted = tuple(tree.token_ids[node] for node in path.node_indices)
        yield (
            accepted,
            math.prod((size for _, size in coins), start=Fraction(1)),
            (path.bonus_token_id),
        )


def residual_distribution(tree: TokenTree, row: int) -> list[Fraction]:
    """The row's distribution without its children, not renormalised."""
    distribution = list(exact_distribution(row_contexts(tree)[row]))
    for node in row_children(tree)[row]:
        distribution[tree.token_ids[node]] = Fraction(0)
    return distribution


def output_distribution(tree: TokenTree, thresholds: Thresholds, length: int) -> Counter[Context]:
    distribution: Counter[Context] = Counter()
    for accepted, weight, row in enumerated(tree, thresholds):
        residual = residual_distribution(tree, row)
        for bonus, mass in enumerate(residual):
            if mass:
                extend(distribution, (*accepted, bonus), weight * mass / sum(residual), length)
    return distribution


def extend(distribution: Counter[Context], tokens: Context, weight: Fraction, length: int) -> None:
    """Adds `tokens` with every plain continuation up to `length`."""
    if len(tokens) >= length:
        distribution[tokens[:length]] += weight  # type: ignore[assignment]
        return
    for token, prob in enumerate(exact_distribution(tokens)):
        if prob:
            extend(distribution, (*tokens, token), weight * prob, length)


def plain_distribution(length: int) -> Counter[Context]:
    distribution: Counter[Context] = Counter()
    extend(distribution, (), Fraction(1), length)
    return distribution


def test_every_tree_gives_exactly_the_targets_distribution_of_three_tokens() -> None:
    expected = plain_distribution(3)
    assert sum(expected.values()) == 1
    for tree in every_tree(vocab_size=3, depth=2):
        assert output_distribution(tree, EXACT, 3) == expected


def test_children_in_any_order_and_repeated_give_the_targets_distribution() -> None:
    trees = [
        TokenTree((2, 0, 1), (None, None, None)),
        TokenTree((0, 0, 1, 1, 0), (None, None, 0, 0, 1)),
        TokenTree((1, 2, 1, 0, 2, 2), (None, None, None, 2, 0, 0)),
        TokenTree.chain((0, 1, 2)),
    ]
    for tree in trees:
        assert output_distribution(tree, EXACT, 3) == plain_distribution(3)


@pytest.mark.parametrize("thresholds", [Thresholds(acc=0.5), Thresholds(single=0.25)])
def test_thresholds_below_one_change_the_distribution(thresholds: Thresholds) -> None:
    """Negative control of the enumeration: the lossy rule favours the first child."""
    tree = TokenTree.chain((0, 1))
    found = output_distribution(tree, thresholds, 3)
    assert sum(found.values()) == 1
    assert found != plain_distribution(3)
    first = sum(weight for tokens, weight in found.items() if tokens[0] == 0)
    assert first > exact_distribution(())[0]


def test_a_threshold_outside_its_range_is_refused() -> None:
    with pytest.raises(InvalidArgument, match=r"accept_threshold_acc is 0\.0.*\(0, 1\]"):
        Thresholds(acc=0.0)
    with pytest.raises(InvalidArgument, match=r"accept_threshold_single is 1\.5"):
        Thresholds(single=1.5)


HIGHEST_COIN = (2**52 - 0.5) / 2**52
LOWEST_COIN = 0.5 / 2**52


def draws_of(
    node_probs: Sequence[float], residual: Sequence[int | None], coin: float
) -> PointMassDraws:
    coins = (coin,) * len(residual)
    return PointMassDraws(tuple(node_probs), tuple(residual), coins)


def test_a_coin_above_the_rounded_sum_of_all_mass_takes_the_last_child_with_mass() -> None:
    tree = TokenTree((4, 5, 6), (None, None, None))
    node_probs = (0.7, 0.3 - 1e-9, 0.0)
    assert sum(node_probs) < HIGHEST_COIN
    draws = draws_of(node_probs, (None, 1, 1, 1), HIGHEST_COIN)
    assert accept_point_mass(tree, draws).node_indices == (1,)


def test_the_lowest_coin_does_not_accept_a_child_without_mass() -> None:
    tree = TokenTree((4, 5), (None, None))
    draws = draws_of((0.0, 1e-300), (9, 1, 1), LOWEST_COIN)
    assert accept_point_mass(tree, draws).token_ids(tree) == (9,)


@pytest.mark.parametrize("thresholds", [EXACT, Thresholds(single=0.01, acc=0.01)])
@pytest.mark.parametrize("coin", [LOWEST_COIN, HIGHEST_COIN])
def test_no_coin_commits_a_token_the_target_forbids(thresholds: Thresholds, coin: float) -> None:
    """Rows whose float32 probabilities sum to a little less or more than 1, some zero."""
    generator = torch.Generator().manual_seed(2)
    logits = torch.randn(200, 6, generator=generator) * 8
    logits[:, 3:] = -torch.inf
    log_probs = logits.log_softmax(-1)
    trees = [TokenTree((4, 0, 3, 1, 2), (None,) * 5)] * 200
    rows = log_probs.repeat_interleave(6, dim=0)
    for row, (tree, draws) in enumerate(
        zip(trees, point_mass_draws(rows, trees, generator), strict=True)
    ):
        forced = draws_of(draws.node_probs, draws.residual_token_ids, coin)
        assert draws.residual_token_ids[0] is None
        first = accept_point_mass(tree, forced, thresholds).token_ids(tree)[0]
        assert log_probs[row, first] > -torch.inf


def test_draws_hold_each_trees_own_rows() -> None:
    log_probs = torch.randn(5, 7, generator=torch.Generator().manual_seed(4)).log_softmax(-1)
    trees = [TokenTree((3, 1), (None, 0)), EMPTY_TREE, TokenTree((6,), (None,))]
    log_probs = torch.cat((log_probs, log_probs[:1]))
    probs = log_probs.exp()
    first, second, third = point_mass_draws(log_probs, trees, torch.Generator().manual_seed(0))
    assert first.node_probs == pytest.approx([float(probs[0, 3]), float(probs[1, 1])])
    assert second.node_probs == ()
    assert third.node_probs == pytest.approx([float(probs[4, 6])])
    assert [len(d.coins) for d in (first, second, third)] == [3, 1, 2]
    assert [len(d.residual_token_ids) for d in (first, second, third)] == [3, 1, 2]


TREE = TokenTree((0, 2, 1, 3), (None, None, 0, 1))
NUM_ROUNDS = 20_000
Decide = Callable[[TokenTree, PointMassDraws], Context]


def first_two_p_value(decide: Decide) -> float:
    """Chi-square of the first token and, where a child was accepted, the second."""
    logits = torch.randn(5, 4, generator=torch.Generator().manual_seed(9))
    log_probs = logits.log_softmax(-1)
    probs = log_probs.double().exp().tolist()
    draws = point_mass_draws(
        log_probs.repeat(NUM_ROUNDS, 1), [TREE] * NUM_ROUNDS, torch.Generator().manual_seed(3)
    )
    observed = Counter(decide(TREE, each)[:2] for each in draws)
    expected: dict[Context, float] = {(1,): probs[0][1], (3,): probs[0][3]}
    for row, first in ((1, 0), (2, 2)):
        expected |= {(first, second): probs[0][first] * probs[row][second] for second in range(4)}
    assert set(observed) <= set(expected)
    return chi_square_p_value(
        [observed[tokens] for tokens in expected], [p * NUM_ROUNDS for p in expected.values()]
    )


def test_committed_tokens_follow_the_targets_distribution() -> None:
    p_value = first_two_p_value(lambda tree, draws: accept_point_mass(tree, draws).token_ids(tree))
    assert p_value > 1e-3


def test_a_slightly_lossy_threshold_is_caught() -> None:
    lossy = Thresholds(acc=0.9)
    p_value = first_two_p_value(
        lambda tree, draws: accept_point_mass(tree, draws, lossy).token_ids(tree)
    )
    assert p_value < 1e-6
