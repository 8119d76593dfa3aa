"""Fan-out goes where verdicts are likely: along the path, by confidence, and to its end."""

from __future__ import annotations

import math
from collections import Counter

import pytest

from services.draft.likely_verdicts import (
    Continuation,
    LikelyVerdict,
    RankShares,
    likely_verdicts,
)
from shared.tokens import TokenTree

DEPTH, WIDTH = 4, 16
CHAIN = TokenTree.chain(range(DEPTH))


def _sure(probability: float) -> list[Continuation]:
    """A first choice, and others each half as likely as the one before. Token is rank; the chain
    holds token d at depth d, which is the first choice there."""
    rest = [(1.0 - probability) * 0.5**rank for rank in range(1, WIDTH)]
    return [(100 + rank, math.log(each)) for rank, each in enumerate([probability, *rest])]


def _continuations(probability: float) -> list[list[Continuation]]:
    found = [_sure(probability) for _ in range(DEPTH + 1)]
    for place, token in enumerate(CHAIN.token_ids):
        found[place][0] = (token, math.log(probability))
    return found


def _chosen(probability: float, budget: int, num_observed: int = 2000) -> list[LikelyVerdict]:
    """Verdicts of a draft that is as often right as it says."""
    shares = RankShares()
    for _ in range(num_observed // 100):
        for rank in range(8):
            share = probability if rank == 0 else (1.0 - probability) * 0.5**rank
            for _ in range(round(100 * share)):
                shares.observe(rank)
    return likely_verdicts(CHAIN, _continuations(probability), shares, budget)


def _by_position(chosen: list[LikelyVerdict]) -> list[int]:
    counts = Counter(each.tree_row for each in chosen)
    return [counts[place] for place in range(DEPTH + 1)]


@pytest.mark.parametrize("probability", [0.8, 0.9, 0.97])
def test_the_end_of_a_likely_path_gets_more_than_the_node_before_it(probability: float) -> None:
    chosen = _chosen(probability, budget=8)
    counts = _by_position(chosen)
    assert counts[DEPTH] > counts[DEPTH - 1]
    assert sum(counts) == 8
    assert (DEPTH, 0) in {(each.tree_row, each.rank) for each in chosen}


def test_of_a_sure_draft_the_whole_path_is_the_likeliest_verdict() -> None:
    first = _chosen(0.9, budget=8)[0]
    assert (first.tree_row, first.rank) == (DEPTH, 0)


@pytest.mark.parametrize("budget", [4, 8, 16])
def test_of_an_unsure_draft_fan_out_falls_off_along_the_path(budget: int) -> None:
    counts = _by_position(_chosen(0.5, budget))
    before_the_end = counts[:DEPTH]
    assert before_the_end == sorted(before_the_end, reverse=True)
    assert counts[0] > counts[DEPTH - 1]


def test_likeliest_verdicts_come_first_and_none_is_a_path_the_tree_holds() -> None:
    chosen = _chosen(0.7, budget=32)
    assert [each.cost for each in chosen] == sorted(each.cost for each in chosen)
    held = {(place, token) for place, token in enumerate(CHAIN.token_ids)}
    assert not held & {(each.tree_row, each.token) for each in chosen}
    conditions = {(each.condition.node_index, each.condition.bonus_token_id) for each in chosen}
    assert len(conditions) == len(chosen)


def test_where_nothing_is_known_to_follow_nothing_is_prepared() -> None:
    continuations = _continuations(0.9)
    continuations[DEPTH] = []
    chosen = likely_verdicts(CHAIN, continuations, RankShares(), 64)
    assert {each.tree_row for each in chosen} == set(range(DEPTH))
