"""Chains for the likeliest verdicts are those that the model grows behind each of them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from shared.runtime.outcome_chains import likeliest, num_outcomes
from shared.runtime.round_state import RoundSampling
from shared.speculation.tree import NO_TOKEN
from tests.helpers.engines import tiny_decoder
from tests.helpers.outcome_cases import LANES, NUM_STEPS, OutcomeCase, check_chains


@pytest.fixture
def case(tmp_path: Path) -> OutcomeCase:
    case = OutcomeCase(tiny_decoder(tmp_path))
    with torch.inference_mode():
        case.chains.prepare(case.code, case.state, RoundSampling.DRAWN)
    return case


@torch.inference_mode()
def test_each_chain_follows_its_verdict(case: OutcomeCase) -> None:
    check_chains(case)


@torch.inference_mode()
def test_a_verdict_that_was_not_foreseen_has_no_tree(case: OutcomeCase) -> None:
    foreseen = case.chains.last_tokens[0][case.chains.lengths[0] == len(LANES[0].token_ids) + 1]
    token = next(token for token in range(24) if token not in foreseen.tolist())
    trees = case.chains.select(case.committed(0, (token,)))
    assert trees[0, 0].tolist() == [token, *[NO_TOKEN] * NUM_STEPS]
    assert case.chains.verified[0].tolist() == [NO_TOKEN] * NUM_STEPS


@torch.inference_mode()
def test_ranks_of_what_the_target_took_are_learnt(case: OutcomeCase) -> None:
    before, second = case.chains.ranks.clone(), int(case.chains.choices[1, 0, 1])
    state = case.committed(1, (second,))
    case.chains.select(state)
    case.chains.prepare(case.code, state, RoundSampling.DRAWN)
    gain = case.chains.ranks - before
    assert gain.argmax() == 1
    assert float(case.chains.num_ranked) == pytest.approx(9.0, rel=0.01)


def test_the_likeliest_verdicts_end_where_the_draft_is_unsure() -> None:
    choices = torch.tensor([[[5, 6], [7, 8], [9, 4]]])
    probs = torch.tensor([[[0.9, 0.1], [0.6, 0.4], [0.7, 0.3]]])
    depths, tokens = likeliest(choices, probs.log(), torch.tensor([[5, 7]]), torch.tensor([2]))
    # 0.9 * 0.6 * 0.7 and 0.9 * 0.4; 0.1 behind the root is less.
    assert (depths.tolist(), tokens.tolist()) == ([[2, 1]], [[9, 8]])
    # Without nodes the verdict is one of what follows the last committed token.
    none = torch.full((1, 2), NO_TOKEN)
    depths, tokens = likeliest(choices, probs.log(), none, torch.tensor([0]))
    assert (depths.tolist(), tokens.tolist()) == ([[0, 0]], [[5, 6]])


def test_fewer_verdicts_are_prepared_for_with_more_lanes() -> None:
    counts = {lanes: num_outcomes(lanes, 3, 8) for lanes in (1, 4, 8, 64, 128)}
    assert counts == {1: 8, 4: 8, 8: 4, 64: 4, 128: 2}
    assert num_outcomes(8, 7, 8) == 8, "one for each depth of a verdict"
    assert num_outcomes(1, 3, 3) == 3, "as many as there is memory for"
