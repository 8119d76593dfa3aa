"""Distributions of rows against plain loops, the processors of transformers, and edge cases. Top-k
takes the lowest index on ties, and scores by which drafts rank are calibrated to acceptance."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from shared.speculation.distributions import (
    coupled_confidence,
    gumbel_noise,
    point_mass_confidence,
    stable_topk,
    target_log_probs,
)
from shared.speculation.row_sampling import RowSampling, TokenCounts, row_sampling
from shared.speculation.verify import draw_tokens
from shared.tokens import SamplingParams
from tests.helpers.token_counts import TokenHistory, count_tokens
from tests.shared.speculation.naive import naive_distribution

CPU = torch.device("cpu")


def sampling_of(*params: SamplingParams, **kwargs: Any) -> RowSampling:
    return row_sampling(params, [1] * len(params), device=CPU, **kwargs)


def distribution(logits: list[float], params: SamplingParams, **kwargs: Any) -> list[float]:
    log_probs = target_log_probs(torch.tensor([logits]), sampling_of(params, **kwargs))
    probs: list[float] = log_probs.exp()[0].tolist()
    return probs


# Quarters tie often; the odd top-p and min-p values never fall on a border of the exact masses.
LOGITS = st.lists(st.integers(-12, 12).map(lambda quarters: quarters / 4), min_size=9, max_size=9)
PARAMS = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.31, 1.0, 1.7]),
    top_k=st.sampled_from([0, 1, 2, 5, 9, 50]),
    top_p=st.sampled_from([0.0371, 0.3719, 0.8113, 0.9931, 1.0]),
    min_p=st.sampled_from([0.0, 0.0719, 0.5381, 1.0]),
    logit_bias=st.dictionaries(st.integers(0, 8), st.sampled_from([-100.0, -1.0, 2.0]), max_size=3),
)


@given(st.lists(st.tuples(LOGITS, PARAMS), min_size=1, max_size=4))
def test_mixed_rows_have_the_distributions_of_plain_loops(
    rows: list[tuple[list[float], SamplingParams]],
) -> None:
    logits = torch.tensor([row[0] for row in rows])
    log_probs = target_log_probs(logits, sampling_of(*(row[1] for row in rows)))
    # A bias of -100 leaves a mass that only float64 can tell from none.
    expected = torch.tensor([naive_distribution(*row) for row in rows], dtype=torch.float64)
    assert torch.equal(log_probs > -math.inf, expected > 0)
    torch.testing.assert_close(log_probs.double().exp(), expected, rtol=1e-4, atol=1e-6)


@given(st.lists(st.tuples(LOGITS, PARAMS), min_size=1, max_size=4))
@settings(max_examples=50)
def test_a_row_does_not_depend_on_the_rows_beside_it(
    rows: list[tuple[list[float], SamplingParams]],
) -> None:
    logits = torch.tensor([row[0] for row in rows])
    together = target_log_probs(logits, sampling_of(*(row[1] for row in rows)))
    for i, (_, params) in enumerate(rows):
        alone = target_log_probs(logits[i : i + 1], sampling_of(params))
        assert torch.equal(alone[0], together[i])


@pytest.mark.parametrize(
    ("params", "processors"),
    [
        (SamplingParams(temperature=0.7), [TemperatureLogitsWarper(0.7)]),
        (SamplingParams(top_k=17), [TopKLogitsWarper(17)]),
        (SamplingParams(top_p=0.83), [TopPLogitsWarper(0.83)]),
        (SamplingParams(min_p=0.11), [MinPLogitsWarper(0.11)]),
        (
            SamplingParams(temperature=1.3, top_k=60, top_p=0.9, min_p=0.02),
            [
                TemperatureLogitsWarper(1.3),
                TopKLogitsWarper(60),
                TopPLogitsWarper(0.9),
                MinPLogitsWarper(0.02),
            ],
        ),
    ],
)
def test_distributions_agree_with_transformers(
    params: SamplingParams, processors: list[Any]
) -> None:
    logits = torch.randn(8, 500, generator=torch.Generator().manual_seed(3)) * 3
    expected = logits
    for processor in processors:
        expected = processor(torch.zeros(8, 1, dtype=torch.int64), expected)
    log_probs = target_log_probs(logits, row_sampling([params], [8], device=CPU))
    torch.testing.assert_close(log_probs.exp(), expected.softmax(-1), rtol=1e-4, atol=1e-7)


def counts_of(prompt: list[int], output: list[int], vocab_size: int) -> TokenCounts | None:
    history = TokenHistory(prompt, output, [()], has_penalties=True)
    return count_tokens([history], vocab_size=vocab_size, device=CPU)


def test_repetition_penalty_agrees_with_transformers() -> None:
    logits = torch.randn(1, 50, generator=torch.Generator().manual_seed(4))
    expected = RepetitionPenaltyLogitsProcessor(1.7)(torch.tensor([[3, 9, 9, 20]]), logits)
    counts = counts_of([3, 9], [9, 20], 50)
    found = target_log_probs(logits, sampling_of(SamplingParams(repetition_penalty=1.7)), counts)
    torch.testing.assert_close(found, expected.log_softmax(-1))


def test_penalties_come_before_bias_and_temperature() -> None:
    params = SamplingParams(
        temperature=0.5, repetition_penalty=2.0, frequency_penalty=0.5, logit_bias={0: -3.0}
    )
    found = target_log_probs(torch.tensor([[4.0, 1.0]]), sampling_of(params), counts_of([], [0], 2))
    expected = torch.tensor([[(4.0 / 2 - 0.5 - 3.0) / 0.5, 1.0 / 0.5]]).log_softmax(-1)
    torch.testing.assert_close(found, expected)


def test_top_p_is_taken_of_what_top_k_leaves() -> None:
    logits = [math.log(p) for p in (0.4, 0.3, 0.2, 0.1)]
    # Of the two kept tokens the first has 4/7 = 0.571, of all four only 0.4.
    assert distribution(logits, SamplingParams(top_k=2, top_p=0.5)) == pytest.approx([1, 0, 0, 0])
    assert distribution(logits, SamplingParams(top_p=0.5)) == pytest.approx([4 / 7, 3 / 7, 0, 0])


@pytest.mark.parametrize(
    "params", [SamplingParams(top_k=2), SamplingParams(top_p=0.49), SamplingParams(top_p=0.5)]
)
def test_ties_at_the_border_keep_the_lowest_ids(params: SamplingParams) -> None:
    assert distribution([1.0, 1.0, 1.0, 1.0], params) == [0.5, 0.5, 0.0, 0.0]
    assert distribution([0.0, 9.0, -9.0, 9.0, 9.0], SamplingParams(top_k=2)) == [0, 0.5, 0, 0.5, 0]


def test_greedy_takes_the_lowest_id_of_equal_logits() -> None:
    assert distribution([0.0, 2.0, 2.0], SamplingParams(temperature=0.0)) == [0, 1, 0]


@pytest.mark.parametrize("temperature", [5e-324, 1e-30, 1e-6])
def test_tiny_temperatures_are_greedy_without_nan(temperature: float) -> None:
    assert distribution([-3.0, 8.0, 2.0], SamplingParams(temperature=temperature)) == [0, 1, 0]


@pytest.mark.parametrize("top_p", [5e-324, 1e-12])
def test_at_least_one_token_survives_every_cut(top_p: float) -> None:
    params = SamplingParams(top_p=top_p, min_p=1.0, top_k=1, temperature=2.0)
    assert distribution([1.0, 1.5, 1.0], params) == [0, 1, 0]


def test_a_full_width_top_k_beside_a_row_without_one_removes_nothing() -> None:
    logits = torch.randn(2, 30, generator=torch.Generator().manual_seed(1))
    rows = sampling_of(SamplingParams(top_k=3), SamplingParams())
    kept = (target_log_probs(logits, rows) > -math.inf).sum(dim=1)
    assert kept.tolist() == [3, 30]


def test_banned_tokens_are_never_drawn() -> None:
    probs = distribution([5.0, 1.0, 1.0], SamplingParams(), banned_token_ids=[(0,)])
    assert probs == [0, 0.5, 0.5]
    greedy = SamplingParams(temperature=0.0)
    assert distribution([5.0, 1.0, 2.0], greedy, banned_token_ids=[(0, 2)]) == [0, 1, 0]


def test_a_row_whose_every_token_is_banned_keeps_them_all() -> None:
    probs = distribution([1.0, 1.0], SamplingParams(), banned_token_ids=[(0, 1)])
    assert probs == [0.5, 0.5]


def test_tokens_removed_beforehand_stay_removed() -> None:
    params = SamplingParams(top_k=3, top_p=0.999, min_p=0.001, logit_bias={1: 50.0})
    logits = [-math.inf, -math.inf, 1.0, 1.0]
    assert distribution(logits, params) == pytest.approx([0, 0, 0.5, 0.5])


def test_half_precision_logits_are_taken_as_they_are() -> None:
    logits = torch.randn(3, 40, generator=torch.Generator().manual_seed(2)).to(torch.bfloat16)
    rows = row_sampling([SamplingParams(top_p=0.7)], [3], device=CPU)
    half, full = target_log_probs(logits, rows), target_log_probs(logits.float(), rows)
    assert half.dtype == torch.float32
    assert torch.equal(half, full)


def kept_by_float_sums(logits: Tensor, top_p: float) -> int:
    probs = logits.softmax(-1).sort(descending=True).values
    return int(((probs.cumsum(-1) - probs) < top_p).sum())


def test_top_p_keeps_the_share_it_names_in_a_large_vocabulary() -> None:
    logits = torch.randn(128_000, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    sampling = sampling_of(SamplingParams(top_p=0.9))
    found = target_log_probs(logits.float().unsqueeze(0), sampling)
    num_kept = int((found > -math.inf).sum())
    assert abs(num_kept - kept_by_float_sums(logits.float().double(), 0.9)) <= 1


def test_parameters_are_repeated_over_each_sequences_rows() -> None:
    params = [SamplingParams(temperature=0.5, seed=2**64 - 1), SamplingParams(seed=2**63)]
    rows = row_sampling(params, [2, 1], device=CPU)
    assert rows.temperatures.flatten().tolist() == [0.5, 0.5, 1.0]
    assert rows.seeds.tolist() == [-1, -1, -(2**63)]


def test_flags_say_what_some_drawing_row_needs() -> None:
    greedy = SamplingParams(temperature=0.0, top_k=4, top_p=0.5, min_p=0.5)
    rows = sampling_of(greedy)
    assert rows.all_greedy
    assert not any((rows.has_top_k, rows.has_top_p, rows.has_min_p, rows.shapes_logits))
    mixed = sampling_of(greedy, SamplingParams(top_k=7), SamplingParams(top_k=3, top_p=0.2))
    assert (mixed.all_greedy, mixed.max_top_k, mixed.has_top_p) == (False, 7, True)
    assert sampling_of(SamplingParams(top_k=7), SamplingParams()).max_top_k is None


def test_rows_without_allowed_tokens_are_left_as_they_are() -> None:
    logits = torch.tensor([[1.0, 3.0, 2.0, 0.0]] * 3)
    params = [SamplingParams(), SamplingParams(allowed_token_ids=(0, 3, 9)), SamplingParams()]
    log_probs = target_log_probs(logits, sampling_of(*params)).exp()
    assert log_probs[1].tolist() == pytest.approx([0.731059, 0, 0, 0.268941], abs=1e-5)
    assert torch.equal(log_probs[0], log_probs[2])
    assert log_probs[0].count_nonzero() == 4


def test_bad_words_of_one_token_are_removed_with_the_banned_ones() -> None:
    params = SamplingParams(bad_words=((1,), (2, 3)))
    assert distribution([1.0, 3.0, 1.0, 1.0], params, banned_token_ids=[(0,)]) == [
        0.0,
        0.0,
        0.5,
        0.5,
    ]
    assert distribution([1.0, 3.0], SamplingParams(bad_words=((0,), (1,)))) == pytest.approx(
        distribution([1.0, 3.0], SamplingParams())
    )


FEW_VALUES = st.sampled_from([-math.inf, -2.5, -0.0, 0.0, 2.0**-149, 1.0, 3.0, math.inf])
ANY_VALUE = st.floats(width=32, allow_nan=False)


@given(st.lists(st.one_of(FEW_VALUES, ANY_VALUE), min_size=1, max_size=20), st.data())
def test_order_is_by_value_then_index(values: list[float], data: st.DataObject) -> None:
    k = data.draw(st.integers(1, len(values)))
    expected = sorted(range(len(values)), key=lambda i: (-values[i], i))[:k]
    best, indices = stable_topk(torch.tensor(values, dtype=torch.float32), k)
    assert indices.tolist() == expected
    assert best.tolist() == [values[i] for i in expected]


def test_leading_axes_are_independent() -> None:
    values = torch.randn(3, 4, 9, generator=torch.Generator().manual_seed(0))
    best, indices = stable_topk(values, 3)
    assert torch.equal(best, values.gather(-1, indices))
    assert torch.equal(best, values.topk(3, dim=-1).values)


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
