"""Scores by which drafts rank: calibrated to acceptance, and better than ignoring the noise."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from shared.speculation.confidence import coupled_confidence, point_mass_confidence
from shared.speculation.distributions import target_log_probs
from shared.speculation.noise import gumbel_noise
from shared.speculation.row_sampling import row_sampling
from shared.speculation.verify import draw_tokens
from shared.tokens import SamplingParams

CPU = torch.device("cpu")
NUM_ROWS, VOCAB_SIZE = 20_000, 8
POSITIONS = torch.arange(NUM_ROWS) % 97


def experiment(params: SamplingParams, error_scale: float = 1.0) -> tuple[Tensor, Tensor, Tensor]:
    """Draft logits, their coupled scores, and the tokens of a target off by Gumbel errors."""
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(NUM_ROWS, VOCAB_SIZE, generator=generator) * 2
    rows = [
        SamplingParams(temperature=params.temperature, top_k=params.top_k, seed=seed)
        for seed in range(NUM_ROWS)
    ]
    sampling = row_sampling(rows, [1] * NUM_ROWS, device=CPU)
    noise = gumbel_noise(sampling.seeds, POSITIONS, VOCAB_SIZE)
    scores = coupled_confidence(logits, sampling, noise)
    errors = gumbel_noise(sampling.seeds, POSITIONS, VOCAB_SIZE, stream=1) * error_scale
    return logits, scores, draw_tokens(logits + errors, sampling, POSITIONS)


def acceptance(scores: Tensor, drawn: Tensor, topk: int) -> float:
    return float((scores.topk(topk).indices == drawn.unsqueeze(1)).any(1).double().mean())


def mean_error(scores: Tensor, drawn: Tensor) -> float:
    """Greatest gap between mean score and acceptance over five bands of the first child's score."""
    best = scores.max(dim=-1)
    accepted = (best.indices == drawn).double()
    bands = best.values.exp().double().sort().indices.chunk(5)
    gaps = [best.values.exp().double()[b].mean() - accepted[b].mean() for b in bands]
    return max(abs(float(gap)) for gap in gaps)


def test_scores_are_the_chance_of_acceptance_under_unit_errors() -> None:
    for temperature in (0.0, 0.7, 1.0):
        params = SamplingParams(temperature=temperature)
        _, scores, drawn = experiment(params)
        assert mean_error(scores, drawn) < 0.025  # 3 sigma of 4,000 rows a band
        torch.testing.assert_close(scores.exp().sum(-1), torch.ones(NUM_ROWS))


def test_scores_that_ignore_the_noise_are_not_calibrated() -> None:
    logits, scores, drawn = experiment(SamplingParams(temperature=1.0))
    perturbed = scores.argmax(-1, keepdim=True)
    blind = logits.log_softmax(-1)
    gap = blind.gather(1, perturbed).exp().mean() - (perturbed.squeeze(1) == drawn).float().mean()
    assert abs(float(gap)) > 0.05


def test_coupled_candidates_are_accepted_more_than_likely_ones() -> None:
    for error_scale in (0.3, 1.0):
        logits, scores, drawn = experiment(SamplingParams(temperature=1.0), error_scale)
        for topk in (1, 2, 4):
            coupled = acceptance(scores, drawn, topk)
            assert coupled > acceptance(logits, drawn, topk) + 0.02


def test_a_perfect_draft_is_always_accepted() -> None:
    for temperature in (0.0, 0.5, 1.3):
        _, scores, drawn = experiment(SamplingParams(temperature=temperature), error_scale=0.0)
        assert acceptance(scores, drawn, 1) == 1.0


def test_removed_tokens_get_no_score() -> None:
    _, scores, drawn = experiment(SamplingParams(temperature=1.0, top_k=2), error_scale=0.0)
    assert (scores > -math.inf).sum(dim=-1).tolist() == [2] * NUM_ROWS
    assert acceptance(scores, drawn, 2) == 1.0


def test_greedy_rows_rank_by_the_plain_probability_in_any_company() -> None:
    logits = torch.randn(2, 9, generator=torch.Generator().manual_seed(3))
    greedy = SamplingParams(temperature=0.0, top_k=1)
    alone = row_sampling([greedy], [2], device=CPU)
    plain = logits.log_softmax(-1)
    assert torch.equal(coupled_confidence(logits, alone, None), plain)
    assert torch.equal(point_mass_confidence(logits, alone), plain)
    mixed = row_sampling([greedy, SamplingParams()], [1, 1], device=CPU)
    noise = gumbel_noise(mixed.seeds, torch.tensor([1, 2]), 9)
    assert torch.equal(coupled_confidence(logits, mixed, noise)[0], plain[0])
    assert torch.equal(point_mass_confidence(logits, mixed)[0], plain[0])


def test_point_mass_scores_are_the_targets_distribution_of_the_draft() -> None:
    logits = torch.randn(3, 9, generator=torch.Generator().manual_seed(3))
    sampling = row_sampling([SamplingParams(temperature=0.6, top_p=0.8)], [3], device=CPU)
    assert torch.equal(point_mass_confidence(logits, sampling), target_log_probs(logits, sampling))
