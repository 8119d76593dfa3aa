"""How many verdicts are prepared for, and how they are weighed."""

from __future__ import annotations

import pytest

from services.draft.likely_verdicts import RankShares, shared_budget
from shared.sampling_defaults import MEMORY_TOKENS


@pytest.mark.parametrize(("num_sequences", "expected"), [(1, 8), (8, 8), (32, 2), (1000, 1)])
def test_budget_is_shared_by_a_large_batch(num_sequences: int, expected: int) -> None:
    assert shared_budget(8, num_sequences) == expected
    assert shared_budget(0, num_sequences) == 0


@pytest.mark.parametrize(("num_sequences", "expected"), [(1, 8), (3, 2), (9, 0)])
def test_where_rows_cost_time_a_batch_shares_the_budget_of_one(
    num_sequences: int, expected: int
) -> None:
    assert shared_budget(8, num_sequences, are_rows_cheap=False) == expected


def test_shares_begin_geometric_and_follow_what_is_observed() -> None:
    shares = RankShares()
    assert shares.share(0) > 1.9 * shares.share(1) > 3.6 * shares.share(2) > 0
    for _ in range(1000):
        shares.observe(2)
        shares.observe(None)
    assert shares.share(2) == pytest.approx(0.5, abs=0.01)
    assert sum(shares.share(rank) for rank in range(64)) < 1.0


def test_old_observations_fade() -> None:
    shares = RankShares()
    for _ in range(int(4 * MEMORY_TOKENS)):
        shares.observe(0)
    for _ in range(int(4 * MEMORY_TOKENS)):
        shares.observe(1)
    assert shares.share(1) > 0.9


def test_a_sure_draft_that_is_often_wrong_is_believed_by_half() -> None:
    shares = RankShares()
    for _ in range(1000):
        shares.observe(1)
    assert shares.log_prob(1, -20.0) > shares.log_prob(5, -1.0)
    assert shares.log_prob(0, 0.0) > shares.log_prob(0, -3.0)
