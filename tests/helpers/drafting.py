"""Drafters called by hand, without a worker: texts, sequences and rounds."""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch
from torch import Tensor

from services.draft.drafters.drafter import Drafter, Proposal, VerifiedTree
from services.draft.sequence import DraftSequence, SequenceKey
from shared.runtime.tree_grower import TreeGrower
from shared.runtime.tree_model import TreeModel
from shared.runtime.tree_pass import PassLimits
from shared.tokens import Outcome, SamplingParams, TokenTree, TreeShape, Verdict

VOCAB_SIZE = 64
GREEDY = SamplingParams(temperature=0.0)
SAMPLED = SamplingParams(temperature=1.0, seed=1234)
OUTCOME_BUDGET = 5


def plain_grower(model: TreeModel, context: int, *, max_sequences: int = 8) -> TreeGrower:
    """Returns a grower without CUDA graphs."""
    return TreeGrower(model, PassLimits(max_sequences, context, has_graphs=False))


def random_text(seed: int, length: int) -> list[int]:
    generator = random.Random(seed)
    return [generator.randrange(VOCAB_SIZE) for _ in range(length)]


def prefix_features(token_ids: Sequence[int], width: int) -> Tensor:
    """Returns made-up features `[N, width]`; row p depends on tokens 0 … p."""
    seed, rows = 0, []
    for token in token_ids:
        seed = (seed * 1_000_003 + token + 1) % 2**31
        rows.append(torch.randn(width, generator=torch.Generator().manual_seed(seed)))
    return torch.stack(rows)


def draft_sequence(
    token_ids: Sequence[int], sampling: SamplingParams = GREEDY, number: int = 1
) -> DraftSequence:
    """Returns a sequence in its first round, with `token_ids` as its prompt."""
    return DraftSequence(
        SequenceKey(1, number), list(token_ids), len(token_ids), sampling, 0, True, VOCAB_SIZE, 256
    )


def mixed_sequences(*lengths: int) -> list[DraftSequence]:
    """Returns a sequence of each length, greedy and sampled in turn."""
    return [
        draft_sequence(random_text(number, length), [GREEDY, SAMPLED][number % 2], number=number)
        for number, length in enumerate(lengths)
    ]


def propose(drafter: Drafter, shape: TreeShape, *sequences: DraftSequence) -> list[TokenTree]:
    """Returns a tree for each sequence, in their order."""
    assert all(drafter.reserve(sequence, shape) for sequence in sequences)
    proposals = drafter.propose(sequences, shape)
    by_key = {proposal.sequence.key: proposal.tree for proposal in proposals}
    assert len(by_key) == len(sequences)
    return [by_key[sequence.key] for sequence in sequences]


def committed(sequence: DraftSequence, tokens: Sequence[int], *nodes: int) -> Verdict:
    """Commits tokens to a sequence and returns their verdict.

    Args:
        nodes: the accepted nodes of the sequence's tree; none when no tree was verified.
    """
    sequence.token_ids.extend(tokens)
    outcome = Outcome.VERIFIED if nodes else Outcome.MISSED
    return Verdict(1, 0, outcome, nodes, tuple(tokens), sequence.num_tokens)


def prepare_ahead(
    drafter: Drafter, shape: TreeShape, *verified: tuple[DraftSequence, TokenTree]
) -> list[Proposal]:
    """Returns the trees that a drafter prepares while trees are verified, at most `OUTCOME_BUDGET`
    for each of them."""
    for sequence, tree in verified:
        drafter.lookahead.begin(VerifiedTree(sequence, tree, shape, OUTCOME_BUDGET))
    proposals: list[Proposal] = []
    while drafter.lookahead.has_work:
        proposals += drafter.lookahead.advance()
        drafter.check()
    return proposals


def foreseen_tokens(tree: TokenTree, proposal: Proposal) -> tuple[int, ...]:
    """Returns the tokens that `tree`'s verdict must commit for a prepared proposal to match."""
    assert proposal.condition is not None
    node = proposal.condition.node_index
    path = () if node is None else tree.path(node)
    return (*(tree.token_ids[index] for index in path), proposal.condition.bonus_token_id)
