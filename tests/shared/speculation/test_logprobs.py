"""Log probabilities come from the raw logits, with ranks and alternatives in a defined order."""

from __future__ import annotations

import math

import pytest
import torch

from shared.speculation.distributions import packed_logprobs, unpacked_logprobs
from shared.tokens import TokenLogprobs

LOGITS = torch.tensor([[math.log(p) + 3 for p in (0.1, 0.4, 0.1, 0.4)]])


def token_logprobs(
    logits: torch.Tensor, token_ids: list[int], num_top: list[int]
) -> tuple[TokenLogprobs, ...]:
    packed = packed_logprobs(logits, torch.tensor(token_ids), max(num_top))
    return unpacked_logprobs(packed, num_top)


def test_chosen_token_has_its_log_prob_and_rank() -> None:
    (found,) = token_logprobs(LOGITS, [2], [0])
    assert found.log_prob == pytest.approx(math.log(0.1), rel=1e-5)
    assert found.rank == 3
    assert found.top == ()


def test_alternatives_are_best_first_and_lowest_id_on_ties() -> None:
    (found,) = token_logprobs(LOGITS, [3], [3])
    assert found.rank == 1
    assert [token for token, _ in found.top] == [1, 3, 0]
    assert [value for _, value in found.top] == pytest.approx(
        [math.log(0.4), math.log(0.4), math.log(0.1)], rel=1e-5
    )


def test_each_row_gets_as_many_alternatives_as_it_asked_for() -> None:
    logits = torch.randn(3, 50, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    found = token_logprobs(logits, [4, 5, 6], [0, 20, 1])
    assert [len(row.top) for row in found] == [0, 20, 1]
    expected = logits.float().log_softmax(-1)
    for row, token in enumerate((4, 5, 6)):
        assert found[row].log_prob == pytest.approx(float(expected[row, token]))
        ordered = sorted(expected[row].tolist(), reverse=True)
        assert found[row].rank == ordered.index(float(expected[row, token])) + 1
        assert [value for _, value in found[row].top] == ordered[: len(found[row].top)]


def test_asking_for_more_than_the_vocabulary_gives_all_of_it() -> None:
    (found,) = token_logprobs(LOGITS, [0], [20])
    assert len(found.top) == 4
