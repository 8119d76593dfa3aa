"""Every sampling parameter at every position of a tree, against one plain row after another."""

from __future__ import annotations

import math

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.speculation.distributions import target_log_probs
from shared.speculation.row_sampling import row_sampling
from shared.speculation.tree import row_paths
from shared.tokens import SamplingParams, TokenTree
from tests.helpers.token_counts import TokenHistory, count_tokens
from tests.shared.speculation.naive import naive_distribution, row_contexts

CPU = torch.device("cpu")
VOCAB_SIZE = 7
IDS = st.lists(st.integers(0, VOCAB_SIZE - 1), min_size=1, max_size=5)
PARAMS = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.6, 1.0]),
    top_k=st.sampled_from([0, 3]),
    top_p=st.sampled_from([0.7919, 1.0]),
    min_p=st.sampled_from([0.0, 0.0837]),
    frequency_penalty=st.sampled_from([-0.7, 0.0, 1.3]),
    presence_penalty=st.sampled_from([-0.4, 0.0, 0.9]),
    repetition_penalty=st.sampled_from([0.8, 1.0, 1.9]),
    logit_bias=st.dictionaries(st.integers(0, VOCAB_SIZE - 1), st.just(1.1), max_size=2),
)


@st.composite
def cases(draw: st.DrawFn) -> tuple[TokenTree, SamplingParams, list[int], list[int], int]:
    size = draw(st.integers(0, 6))
    parents = [draw(st.sampled_from([None, *range(node)])) for node in range(size)]
    tokens = draw(st.lists(st.integers(0, VOCAB_SIZE - 1), min_size=size, max_size=size))
    tree = TokenTree(tuple(tokens), tuple(parents))
    return tree, draw(PARAMS), draw(IDS), draw(IDS), draw(st.integers(0, 8))


Case = tuple[TokenTree, SamplingParams, list[int], list[int], int]


def tree_distributions(batch: list[Case], logits: torch.Tensor) -> torch.Tensor:
    sampling = row_sampling(
        [params for _, params, *_ in batch],
        [len(tree) + 1 for tree, *_ in batch],
        device=CPU,
        banned_token_ids=[
            (2, 5) if len(output) + depth < minimum else ()
            for tree, _, _, output, minimum in batch
            for depth in (0, *tree.depths)
        ],
    )
    histories = [
        TokenHistory(prompt, output, row_paths(tree), params.has_penalties)
        for tree, params, prompt, output, _ in batch
    ]
    counts = count_tokens(histories, vocab_size=VOCAB_SIZE, device=CPU)
    return target_log_probs(logits, sampling, counts).exp()


def plain_distributions(batch: list[Case], logits: torch.Tensor) -> list[list[float]]:
    rows = iter(logits.tolist())
    return [
        naive_distribution(
            next(rows),
            params,
            prompt=prompt,
            output=[*output, *context],
            banned=(2, 5) if len(output) + len(context) < minimum else (),
        )
        for tree, params, prompt, output, minimum in batch
        for context in row_contexts(tree)
    ]


@given(st.lists(cases(), min_size=1, max_size=3), st.integers(0, 10**6))
@settings(max_examples=150)
def test_each_row_of_a_tree_has_the_distribution_of_plain_decoding_after_its_path(
    batch: list[Case], seed: int
) -> None:
    num_rows = sum(len(tree) + 1 for tree, *_ in batch)
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(num_rows, VOCAB_SIZE, generator=generator) * 2
    found, expected = (
        tree_distributions(batch, logits),
        torch.tensor(plain_distributions(batch, logits)),
    )
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_penalties_that_skip_the_path_are_noticed() -> None:
    """The oracle itself would fail on the known trap: counting only the committed tokens."""
    params = SamplingParams(frequency_penalty=2.0)
    case = (TokenTree.chain((1, 1, 3)), params, [0], [4], 0)
    logits = torch.zeros(4, VOCAB_SIZE)
    right = tree_distributions([case], logits)
    history = TokenHistory([0], [4], [()] * 4, has_penalties=True)
    counts = count_tokens([history], vocab_size=VOCAB_SIZE, device=CPU)
    wrong = target_log_probs(logits, row_sampling([params], [4], device=CPU), counts).exp()
    torch.testing.assert_close(right, torch.tensor(plain_distributions([case], logits)))
    assert math.isclose(float(right[0].sub(wrong[0]).abs().max()), 0.0, abs_tol=1e-7)
    assert all(float(right[row].sub(wrong[row]).abs().max()) > 0.05 for row in (1, 2, 3))
