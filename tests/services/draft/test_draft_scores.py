"""Scores of mixed batches: noise, transforms and penalties of each sequence apart."""

from __future__ import annotations

import pickle

import pytest
import torch

from services.draft.draft_scores import DraftScores
from services.draft.sequence import DraftSequence, SequenceKey
from shared.speculation.distributions import gumbel_noise
from shared.tokens import SamplingParams

VOCAB_SIZE = 40


def _sequence(sampling: SamplingParams, *, mirrors_noise: bool = True) -> DraftSequence:
    return DraftSequence(
        SequenceKey(1, 1), [3, 1, 4, 1, 5], 3, sampling, 0, mirrors_noise, VOCAB_SIZE, 64
    )


def _logits(rows: int) -> torch.Tensor:
    return torch.randn(rows, VOCAB_SIZE, generator=torch.Generator().manual_seed(0))


def _noise(seed: int, position: int) -> torch.Tensor:
    return gumbel_noise(torch.tensor([seed]), torch.tensor([position]), VOCAB_SIZE)[0]


def test_rows_of_every_kind_of_sequence_score_apart() -> None:
    sequences = [
        _sequence(SamplingParams(temperature=0.0)),
        _sequence(SamplingParams(temperature=0.5, seed=9)),
        _sequence(SamplingParams(temperature=0.5, seed=9), mirrors_noise=False),
    ]
    logits = _logits(6)
    scores = DraftScores(sequences)(logits, [[(7,), (8,)]] * 3)
    assert scores.shape == (3, 2, VOCAB_SIZE)
    torch.testing.assert_close(scores[0], logits[:2].log_softmax(-1))
    # Five committed tokens and one on the path: the next is drawn at position 6.
    noisy = logits[2:4] + 0.5 * _noise(9, 6)
    torch.testing.assert_close(scores[1], noisy.log_softmax(-1))
    torch.testing.assert_close(scores[2], (logits[4:] / 0.5).log_softmax(-1))


def test_a_batch_without_shared_noise_adds_none() -> None:
    sequence = _sequence(SamplingParams(temperature=1.0, seed=9), mirrors_noise=False)
    logits = _logits(1)
    scores = DraftScores([sequence])(logits, [[()]])
    torch.testing.assert_close(scores[0], logits.log_softmax(-1))


def test_top_k_removes_candidates() -> None:
    sequence = _sequence(SamplingParams(temperature=1.0, seed=9, top_k=3))
    scores = DraftScores([sequence])(_logits(1), [[()]])
    assert int(scores.isfinite().sum()) == 3


def test_penalties_count_the_output_and_the_rows_own_path() -> None:
    sampling = SamplingParams(temperature=0.0, frequency_penalty=1.5)
    logits = torch.zeros(2, VOCAB_SIZE)
    scores = DraftScores([_sequence(sampling)])(logits, [[(7,), (5,)]])[0]
    relative = scores - scores[:, :1]
    # The output is [1, 5]; the first row's path adds 7, the second's another 5.
    assert relative[0, [1, 5, 7, 3]].tolist() == pytest.approx([-1.5, -1.5, -1.5, 0.0])
    assert relative[1, [1, 5, 7, 3]].tolist() == pytest.approx([-1.5, -3.0, 0.0, 0.0])


def test_levels_of_a_tree_count_their_own_paths() -> None:
    sequences = [
        _sequence(SamplingParams(temperature=0.0, frequency_penalty=1.5)),
        _sequence(SamplingParams(temperature=0.0)),
    ]
    scores = DraftScores(sequences)
    levels = [
        scores(torch.zeros(2, VOCAB_SIZE), [[path], [path]]) for path in ((), (7,), (7, 7), (9,))
    ]
    relative = torch.stack([level[:, 0] - level[:, 0, :1] for level in levels])
    assert relative[:, 0, [1, 7, 9]].tolist() == [
        pytest.approx(row)
        for row in ([-1.5, 0.0, 0.0], [-1.5, -1.5, 0.0], [-1.5, -3.0, 0.0], [-1.5, 0.0, -1.5])
    ]
    assert not relative[:, 1].any()


def test_what_another_process_is_sent_scores_alike() -> None:
    sampling = SamplingParams(temperature=0.7, seed=3, presence_penalty=1.0, logit_bias={4: 2.0})
    scores, paths = DraftScores([_sequence(sampling)]), torch.tensor([[[7], [5]]])
    sent = pickle.loads(pickle.dumps(scores))
    assert torch.equal(sent.confidence(_logits(2), paths), scores.confidence(_logits(2), paths))
    assert torch.equal(sent(_logits(2), [[(7,), (5,)]]), scores.confidence(_logits(2), paths))
