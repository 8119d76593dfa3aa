"""The coupled rule: its output is plain decoding's, token for token, whatever the tree holds."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

import pytest
import torch
from torch import Tensor

from shared.speculation.distributions import target_log_probs
from shared.speculation.row_sampling import row_sampling
from shared.speculation.verify import accept_path, coupled_draw, draw_tokens
from shared.tokens import EMPTY_TREE, SamplingParams, TokenTree
from tests.shared.speculation.naive import (
    chi_square_p_value,
    every_tree,
    joint_distribution,
    row_contexts,
)

CPU = torch.device("cpu")
VOCAB_SIZE = 4
LENGTH = 3
NUM_ROUNDS = 20_000
Context = tuple[int, ...]


class ToyTarget:
    """A distribution for every context of up to `LENGTH` tokens; some tokens have no mass."""

    def __init__(self, vocab_size: int = VOCAB_SIZE) -> None:
        generator = torch.Generator().manual_seed(11)
        self.contexts: list[Context] = [
            context
            for length in range(LENGTH + 1)
            for context in itertools.product(range(vocab_size), repeat=length)
        ]
        self.rows = {context: row for row, context in enumerate(self.contexts)}
        logits = torch.randn(len(self.contexts), vocab_size, generator=generator) * 1.5
        logits[1::5, 2] = -torch.inf
        self.log_probs = logits.log_softmax(-1)
        self.probs = self.log_probs.double().exp()

    def distribution(self, context: Context) -> list[float]:
        probs: list[float] = self.probs[self.rows[context]].tolist()
        return probs

    def distributions(self, contexts: Sequence[Context]) -> Tensor:
        return self.log_probs[torch.tensor([self.rows[context] for context in contexts])]


def plain_draws(target: ToyTarget, seed: int) -> Mapping[Context, int]:
    """The coupled token after every context when the prompt has 10 tokens."""
    positions = torch.tensor([10 + len(context) for context in target.contexts])
    seeds = torch.full_like(positions, seed)
    drawn = coupled_draw(target.log_probs, seeds, positions).tolist()
    return dict(zip(target.contexts, drawn, strict=True))


def plain_continuation(draws: Mapping[Context, int]) -> Context:
    tokens: Context = ()
    for _ in range(LENGTH):
        tokens = (*tokens, draws[tokens])
    return tokens


def test_every_tree_commits_plain_decodings_tokens() -> None:
    target = ToyTarget(vocab_size=3)
    trees = list(every_tree(vocab_size=3, depth=2))
    assert len(trees) == 9**3
    accepted: Counter[int] = Counter()
    for seed in range(12):
        draws = plain_draws(target, seed)
        expected = plain_continuation(draws)
        for tree in trees:
            path = accept_path(tree, [draws[context] for context in row_contexts(tree)])
            tokens = path.token_ids(tree)
            assert tokens == expected[: len(tokens)]
            accepted[len(path.node_indices)] += 1
    assert set(accepted) == {0, 1, 2}


def test_the_accepted_path_is_the_deepest_that_matches() -> None:
    target = ToyTarget(vocab_size=3)
    draws = plain_draws(target, seed=5)
    expected = plain_continuation(draws)
    for tree in every_tree(vocab_size=3, depth=2):
        path = accept_path(tree, [draws[context] for context in row_contexts(tree)])
        matching = [c for c in row_contexts(tree) if c == expected[: len(c)]]
        assert len(path.node_indices) == max(len(context) for context in matching)


def test_the_first_of_equal_siblings_counts() -> None:
    tree = TokenTree((5, 5, 6, 7), (None, None, 0, 1))
    assert accept_path(tree, [5, 7, 7, 1, 2]).token_ids(tree) == (5, 7)
    assert accept_path(tree, [5, 6, 7, 1, 2]).node_indices == (0, 2)


def test_an_empty_tree_gives_the_bonus_alone() -> None:
    path = accept_path(EMPTY_TREE, [3])
    assert (path.node_indices, path.bonus_token_id) == ((), 3)


def test_coupled_draw_follows_the_noise_of_its_position_only() -> None:
    log_probs = torch.zeros(4, 50).log_softmax(-1)
    seeds, positions = torch.tensor([1, 1, 1, 2]), torch.tensor([9, 9, 10, 9])
    drawn = coupled_draw(log_probs, seeds, positions).tolist()
    assert drawn[0] == drawn[1]
    assert len(set(drawn)) == 3


def test_drawing_skips_the_noise_for_greedy_rows_in_any_company() -> None:
    logits = torch.randn(6, 30, generator=torch.Generator().manual_seed(6))
    greedy, hot = SamplingParams(temperature=0.0), SamplingParams(temperature=1.5, seed=4)
    positions = torch.arange(6)
    alone = draw_tokens(logits, row_sampling([greedy], [6], device=CPU), positions)
    assert torch.equal(alone, logits.argmax(-1))
    mixed = draw_tokens(logits, row_sampling([greedy, hot], [3, 3], device=CPU), positions)
    assert torch.equal(mixed[:3], alone[:3])
    only_hot = draw_tokens(logits[3:], row_sampling([hot], [3], device=CPU), positions[3:])
    assert torch.equal(mixed[3:], only_hot)


def noisy_trees(target: ToyTarget) -> list[TokenTree]:
    """Trees picked by the very noise the target uses, with distributions the draft got wrong."""
    flat = (target.log_probs * 0.4).log_softmax(-1)
    seeds = torch.arange(NUM_ROUNDS)
    first = coupled_draw(flat[:1].expand(NUM_ROUNDS, -1), seeds, torch.full_like(seeds, 10))
    after = torch.tensor([[target.rows[(token,)]] for token in first.tolist()]).squeeze(1)
    second = coupled_draw(flat[after], seeds, torch.full_like(seeds, 11))
    return [
        TokenTree((f, (f + 1) % VOCAB_SIZE, s, 0, 3), (None, None, 0, 1, 0))
        if f != s
        else TokenTree((f, s), (None, 0))
        for f, s in zip(first.tolist(), second.tolist(), strict=True)
    ]


Draw = Callable[[Tensor, Tensor, Tensor], Tensor]


def committed(target: ToyTarget, trees: Sequence[TokenTree], draw: Draw) -> list[Context]:
    """The first tokens of each round's output: one round with its tree, then plain rounds."""
    outputs: list[Context] = [()] * len(trees)
    for round_trees in (trees, *([EMPTY_TREE] * len(trees),) * (LENGTH - 1)):
        contexts = [
            (*output, *path)[:LENGTH]
            for output, tree in zip(outputs, round_trees, strict=True)
            for path in row_contexts(tree)
        ]
        seeds = [seed for seed, tree in enumerate(round_trees) for _ in range(len(tree) + 1)]
        positions = [
            position
            for output, tree in zip(outputs, round_trees, strict=True)
            for position in (10 + len(output) + depth for depth in (0, *tree.depths))
        ]
        distributions = target.distributions(contexts)
        drawn = iter(draw(distributions, torch.tensor(seeds), torch.tensor(positions)).tolist())
        for i, tree in enumerate(round_trees):
            rows = [next(drawn) for _ in range(len(tree) + 1)]
            outputs[i] = (*outputs[i], *accept_path(tree, rows).token_ids(tree))
    return [output[:LENGTH] for output in outputs]


def position_p_values(target: ToyTarget, outputs: Sequence[Context]) -> list[float]:
    """One p-value for each position's marginal, then that of the joint distribution."""
    joint = joint_distribution(target.distribution, VOCAB_SIZE, LENGTH)
    p_values = []
    for cells in (*([i] for i in range(LENGTH)), list(range(LENGTH))):
        observed = Counter(tuple(output[i] for i in cells) for output in outputs)
        expected: Counter[Context] = Counter()
        for tokens, prob in joint.items():
            expected[tuple(tokens[i] for i in cells)] += prob * len(outputs)  # type: ignore[assignment]
        keys = sorted(expected)
        p_values.append(
            chi_square_p_value([observed[k] for k in keys], [expected[k] for k in keys])
        )
    return p_values


def test_coupled_output_follows_the_targets_distribution_at_every_position() -> None:
    target = ToyTarget()
    outputs = committed(target, noisy_trees(target), coupled_draw)
    assert min(position_p_values(target, outputs)) > 1e-3


def test_verifying_by_argmax_is_caught() -> None:
    """Negative control: the known trap of taking the highest logit where a tree is missed."""

    def argmax_at_times(distributions: Tensor, seeds: Tensor, positions: Tensor) -> Tensor:
        drawn = coupled_draw(distributions, seeds, positions)
        return torch.where(seeds % 5 == 0, distributions.argmax(-1), drawn)

    target = ToyTarget()
    outputs = committed(target, noisy_trees(target), argmax_at_times)
    assert max(position_p_values(target, outputs)) < 1e-6


def test_output_is_the_same_with_trees_and_without() -> None:
    target = ToyTarget()
    trees = noisy_trees(target)[:2000]
    with_trees = committed(target, trees, coupled_draw)
    assert with_trees == committed(target, [EMPTY_TREE] * len(trees), coupled_draw)


@pytest.mark.parametrize("params", [SamplingParams(top_k=3), SamplingParams(min_p=0.3)])
def test_a_removed_token_is_never_drawn(params: SamplingParams) -> None:
    logits = torch.randn(2000, 6, generator=torch.Generator().manual_seed(8))
    sampling = row_sampling([params], [2000], device=CPU)
    drawn = draw_tokens(logits, sampling, torch.arange(2000))
    drawn_log_probs = target_log_probs(logits, sampling).gather(1, drawn.unsqueeze(1))
    assert bool((drawn_log_probs > -torch.inf).all())
