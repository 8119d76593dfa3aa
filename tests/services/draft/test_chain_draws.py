"""What a draft draws is what it says it drew from."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from services.draft.draft_scores import ChainDraws, request_scores
from services.draft.sequence import DraftSequence, SequenceKey
from shared.speculation.rejection import DrawnChain
from shared.tokens import SamplingParams, TokenTree, TreeShape
from tests.shared.speculation.naive import chi_square_p_value, naive_distribution

VOCAB_SIZE = 8
TRUNCATED = SamplingParams(
    temperature=0.8, top_k=5, top_p=0.95, frequency_penalty=0.6, logit_bias={7: 2.0}, seed=3
)


def _sequence(sampling: SamplingParams = TRUNCATED, sequence_id: int = 1) -> DraftSequence:
    return DraftSequence(
        SequenceKey(1, sequence_id),
        token_ids=[5, 1, 2],
        num_prompt_tokens=2,
        sampling=sampling,
        round=0,
        mirrors_noise=False,
        vocab_size=VOCAB_SIZE,
        max_nodes=8,
        draws_chains=True,
    )


def _drawn(sequences: list[DraftSequence], logits: torch.Tensor, seed: int) -> list[DrawnChain]:
    """Draws chains of two tokens; both levels have the same raw logits."""
    draws = ChainDraws(sequences, torch.Generator().manual_seed(seed))
    paths = torch.empty((len(sequences), 1, 0), dtype=torch.int64)
    for _ in range(2):
        scores = draws.confidence(logits, paths)
        assert scores.shape == (len(sequences), 1, VOCAB_SIZE)
        paths = torch.cat((paths, scores.argmax(-1, keepdim=True)), dim=2)
    chains = draws.finished([TokenTree.chain(path) for [path] in paths.tolist()])
    assert all(isinstance(chain, DrawnChain) for chain in chains)
    return [chain for chain in chains if isinstance(chain, DrawnChain)]


@pytest.mark.parametrize("width", [VOCAB_SIZE - 2, VOCAB_SIZE, VOCAB_SIZE + 5])
def test_distributions_are_those_of_the_request_over_the_targets_tokens(width: int) -> None:
    logits = torch.randn(1, width, generator=torch.Generator().manual_seed(2))
    if width > VOCAB_SIZE:
        logits[:, VOCAB_SIZE:] += 9.0  # tokens that the target does not have
    known = [*logits[0].tolist(), *[-torch.inf] * VOCAB_SIZE][:VOCAB_SIZE]
    [chain] = _drawn([_sequence()], logits, seed=0)
    assert chain.draft_log_probs.shape == (2, VOCAB_SIZE)
    assert chain.log_probs == ()
    for place, row in enumerate(chain.draft_log_probs):
        output = [2, *chain.token_ids[:place]]
        distribution = naive_distribution(known, TRUNCATED, prompt=[5, 1], output=output)
        assert row.exp().tolist() == pytest.approx(distribution, abs=1e-6)
        assert distribution[chain.token_ids[place]] > 0.0


def test_tokens_follow_their_distributions_and_not_the_seed() -> None:
    count = 4000
    sequences = [_sequence(sequence_id=i) for i in range(count)]
    logits = torch.randn(1, VOCAB_SIZE, generator=torch.Generator().manual_seed(2))
    chains = _drawn(sequences, logits.expand(count, -1), seed=1)
    probs = chains[0].draft_log_probs[0].exp()
    first = Counter(chain.token_ids[0] for chain in chains)
    observed = [first[token] for token in range(VOCAB_SIZE)]
    assert chi_square_p_value(observed, (count * probs).tolist()) > 1e-3
    assert chi_square_p_value(observed, (count * probs**1.2).tolist()) < 1e-6


def test_no_two_rounds_share_their_randomness() -> None:
    logits = torch.zeros(1, VOCAB_SIZE)
    nothing = torch.empty((1, 1, 0), dtype=torch.int64)
    generator = torch.Generator().manual_seed(4)
    rounds = [
        int(ChainDraws([_sequence()], generator).confidence(logits, nothing).argmax())
        for _ in range(64)
    ]
    assert len(set(rounds)) > 4


def test_trees_with_branches_are_not_drawn() -> None:
    generator = torch.Generator()
    drawing = [_sequence()]
    assert isinstance(request_scores(drawing, TreeShape(3, 1, 4), generator), ChainDraws)
    assert not isinstance(request_scores(drawing, TreeShape(3, 2, 6), generator), ChainDraws)
