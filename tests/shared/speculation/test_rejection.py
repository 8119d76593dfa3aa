"""Rejection and block verification: exact by enumeration, by statistics, and at the edges."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence

import pytest
import torch
from torch import Tensor

import shared.speculation.rejection as rejection
from shared.speculation.rejection import (
    BLOCK,
    REJECTION,
    ChainDistributions,
    ChainRule,
    DrawnChain,
    accept_chains,
)
from tests.shared.speculation.naive import chi_square_p_value, joint_distribution

Context = tuple[int, ...]
Distributions = Callable[[Context], Sequence[float]]
VOCAB_SIZE = 3
RULES = {"rejection": REJECTION, "block": BLOCK}
PAIRS = {
    "both full": (((7, 4, 5), (2, 10, 4), (1, 9, 6)), ((3, 3, 10), (6, 5, 5), (12, 2, 2))),
    "zeros": (((7, 0, 9), (0, 10, 6), (1, 0, 15)), ((0, 8, 8), (5, 0, 11), (16, 0, 0))),
    "identical": (((7, 4, 5), (0, 10, 6)), ((7, 4, 5), (0, 10, 6))),
    "disjoint": (((16, 0, 0), (0, 10, 6)), ((0, 3, 13), (16, 0, 0))),
    "points": (((16, 0, 0), (0, 16, 0)), ((0, 16, 0), (0, 16, 0))),
    "target a point": (((0, 16, 0), (0, 0, 16)), ((5, 6, 5), (1, 14, 1))),
    "draft a point": (((7, 4, 5), (2, 10, 4)), ((0, 0, 16), (0, 16, 0))),
}


def sixteenths(table: Sequence[Sequence[int]]) -> Distributions:
    """A distribution for every context, none like its neighbours'."""

    def distribution(context: Context) -> Sequence[float]:
        index = sum((token + 1) * 4**place for place, token in enumerate(context))
        return [each / 16 for each in table[index % len(table)]]

    return distribution


@pytest.fixture(params=RULES)
def rule(request: pytest.FixtureRequest) -> ChainRule:
    return RULES[request.param]


def log_rows(distribution: Distributions, contexts: Sequence[Context]) -> Tensor:
    return (
        torch.tensor([distribution(each) for each in contexts], dtype=torch.float64).log().float()
    )


def prefixes(tokens: Context, count: int) -> list[Context]:
    return [tokens[:place] for place in range(count)]


def enumerated(
    target: Distributions,
    draft: Distributions,
    depth: int,
    rule: ChainRule,
    drawn_from: Distributions | None = None,
) -> Iterator[tuple[float, Context, Tensor]]:
    """Every chain with every number of accepted tokens: the probability of it, the accepted
    tokens, and the distribution of the bonus token after them.

    Args:
        draft: the distribution that is handed over.
        drawn_from: the one that tokens come from; the same if left out.
    """
    for tokens, weight in joint_distribution(drawn_from or draft, VOCAB_SIZE, depth).items():
        if weight == 0.0 or any(not draft(tokens[:i])[tokens[i]] for i in range(depth)):
            continue
        chain = DrawnChain.of(tokens, log_rows(draft, prefixes(tokens, depth)))
        log_probs = log_rows(target, prefixes(tokens, depth + 1))
        rows = rule.rows(ChainDistributions.of(log_probs, [chain]))
        residuals = rows.residuals / rows.residuals.sum(-1, keepdim=True)
        thresholds = rows.thresholds.tolist()
        for passes in itertools.product((False, True), repeat=depth):
            coins = math.prod(t if ok else 1 - t for t, ok in zip(thresholds, passes, strict=True))
            count = rule.num_accepted(passes)
            yield weight * coins, tokens[:count], residuals[count]


def output_distribution(
    target: Distributions,
    draft: Distributions,
    depth: int,
    rule: ChainRule,
    drawn_from: Distributions | None = None,
) -> Counter[Context]:
    """The distribution of depth + 1 tokens: what a round commits, and plain decoding after it."""
    found: Counter[Context] = Counter()
    for weight, accepted, residual in enumerated(target, draft, depth, rule, drawn_from):
        for bonus, prob in enumerate(residual.tolist()):
            if weight * prob:
                head = (*accepted, bonus)
                for tail, rest in continuations(target, head, depth + 1).items():
                    found[(*head, *tail)] += weight * prob * rest  # type: ignore[assignment]
    return found


def continuations(target: Distributions, head: Context, length: int) -> dict[Context, float]:
    return joint_distribution(lambda tail: target((*head, *tail)), VOCAB_SIZE, length - len(head))


def accepted_length(
    target: Distributions, draft: Distributions, depth: int, rule: ChainRule
) -> float:
    return sum(
        weight * len(accepted) for weight, accepted, _ in enumerated(target, draft, depth, rule)
    )


def distance(found: Counter[Context], expected: dict[Context, float]) -> float:
    """In total variation."""
    return sum(abs(found[tokens] - prob) for tokens, prob in expected.items()) / 2


@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize("depth", [1, 2, 3])
def test_output_has_exactly_the_targets_distribution(
    pair: str, depth: int, rule: ChainRule
) -> None:
    target, draft = map(sixteenths, PAIRS[pair])
    found = output_distribution(target, draft, depth, rule)
    assert sum(found.values()) == pytest.approx(1.0)
    assert distance(found, joint_distribution(target, VOCAB_SIZE, depth + 1)) < 1e-6


def test_a_distribution_that_tokens_were_not_drawn_from_is_noticed(rule: ChainRule) -> None:
    """Negative control: the distribution before truncation is handed over, or one of another
    temperature."""
    target, full = map(sixteenths, PAIRS["both full"])

    def truncated(context: Context) -> list[float]:
        kept = [prob if prob >= max(full(context)) / 3 else 0.0 for prob in full(context)]
        return [prob / sum(kept) for prob in kept]

    def sharper(context: Context) -> list[float]:
        powers = [prob**1.2 for prob in full(context)]
        return [power / sum(powers) for power in powers]

    expected = joint_distribution(target, VOCAB_SIZE, 3)
    assert distance(output_distribution(target, full, 2, rule), expected) < 1e-6
    for drawn_from in (truncated, sharper):
        assert distance(output_distribution(target, full, 2, rule, drawn_from), expected) > 0.01


def test_a_chain_cut_by_its_own_token_is_noticed(rule: ChainRule) -> None:
    """Negative control: nodes are verified only where the draft found them likely."""
    target, draft = map(sixteenths, PAIRS["both full"])
    found: Counter[Context] = Counter()
    for token, prob in enumerate(draft(())):
        if prob < 0.5:  # not verified: plain decoding
            for tokens, rest in joint_distribution(target, VOCAB_SIZE, 2).items():
                found[tokens] += prob * rest  # type: ignore[assignment]
        else:
            point = [float(each == token) for each in range(VOCAB_SIZE)]
            rows = output_distribution(target, draft, 1, rule, lambda _, point=point: point)
            for tokens, rest in rows.items():
                found[tokens] += prob * rest
    assert sum(found.values()) == pytest.approx(1.0)
    assert distance(found, joint_distribution(target, VOCAB_SIZE, 2)) > 0.05


@pytest.mark.parametrize("rule_name", RULES)
def test_a_chain_may_end_for_what_its_last_node_holds(rule_name: str) -> None:
    """As where a grammar ends: nodes after a certain token are left out, the token itself not."""
    target, draft = map(sixteenths, PAIRS["both full"])
    rule, found = RULES[rule_name], Counter[Context]()
    for first in range(VOCAB_SIZE):

        def begun(context: Context, first: int = first) -> Sequence[float]:
            if context:
                return draft(context)
            return [draft(())[first] * (token == first) for token in range(VOCAB_SIZE)]

        depth = 1 if first == 1 else 2
        for tokens, prob in output_distribution(target, draft, depth, rule, begun).items():
            for tail, rest in continuations(target, tokens, 3).items():
                found[(*tokens, *tail)] += prob * rest  # type: ignore[assignment]
    assert distance(found, joint_distribution(target, VOCAB_SIZE, 3)) < 1e-6


@pytest.mark.parametrize("pair", PAIRS)
def test_block_verification_accepts_no_less(pair: str) -> None:
    target, draft = map(sixteenths, PAIRS[pair])
    for depth in (1, 2, 3):
        one_by_one = accepted_length(target, draft, depth, REJECTION)
        whole = accepted_length(target, draft, depth, BLOCK)
        assert whole >= one_by_one - 1e-9
        if pair == "identical":
            assert one_by_one == pytest.approx(depth)
    if pair == "both full":
        assert whole > one_by_one + 0.02


def test_one_token_is_accepted_with_the_overlap_of_both_distributions(rule: ChainRule) -> None:
    target, draft = map(sixteenths, PAIRS["both full"])
    overlap = sum(map(min, target(()), draft(())))
    assert accepted_length(target, draft, 1, rule) == pytest.approx(overlap, abs=1e-6)


LOWEST_COIN, HIGHEST_COIN = 0.5 / 2**52, (2**52 - 0.5) / 2**52


@pytest.mark.parametrize("coin", [LOWEST_COIN, HIGHEST_COIN])
def test_no_coin_commits_a_token_the_target_forbids(
    coin: float, rule: ChainRule, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Float32 distributions that sum to a little less or more than 1, and share few tokens or
    all."""
    monkeypatch.setattr(rejection, "fresh_coins", lambda count, _: (coin,) * count)
    source = torch.Generator().manual_seed(2)
    target_logits = torch.randn(200, 4, 6, generator=source) * 8
    target_logits[:, :, 3:] = -torch.inf
    target_logits[100:, :, 3:] = torch.randn(100, 4, 3, generator=source)
    draft_logits = torch.randn(200, 3, 6, generator=source) * 8
    draft_logits[:50] = target_logits[:50, :3]  # equal but for rounding
    log_probs, distributions = target_logits.log_softmax(-1), (draft_logits + 0.1).log_softmax(-1)
    tokens = [
        [int(torch.multinomial(distribution.exp(), 1, generator=source)) for distribution in each]
        for each in distributions
    ]
    chains = [DrawnChain.of(*each) for each in zip(tokens, distributions, strict=True)]
    paths = accept_chains(log_probs.flatten(0, 1), chains, rule, source)
    for rows, chain, path in zip(log_probs, chains, paths, strict=True):
        for row, token in zip(rows, path.token_ids(chain), strict=False):
            assert row[token] > -torch.inf


def test_equal_distributions_are_accepted_whole_whatever_the_coin(
    rule: ChainRule, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rejection, "fresh_coins", lambda count, _: (HIGHEST_COIN,) * count)
    log_probs = torch.randn(5, 7, generator=torch.Generator().manual_seed(4)).log_softmax(-1)
    chain = DrawnChain.of((3, 0, 6, 1), log_probs[:4])
    [path] = accept_chains(log_probs, [chain], rule, torch.Generator())
    assert path.node_indices == (0, 1, 2, 3)


def test_a_token_without_mass_in_its_own_distribution_is_our_bug(rule: ChainRule) -> None:
    distribution = torch.tensor([[0.5, 0.5, 0.0]]).log()
    chain = DrawnChain.of((2,), distribution)
    with pytest.raises(AssertionError, match="cannot have drawn"):
        accept_chains(distribution.repeat(2, 1), [chain], rule, torch.Generator())


def test_chains_of_a_batch_do_not_touch_each_other(rule: ChainRule) -> None:
    source = torch.Generator().manual_seed(8)
    lengths = (3, 1, 2)
    chains = [
        DrawnChain.of(tuple(range(n)), torch.randn(n, 5, generator=source).log_softmax(-1))
        for n in lengths
    ]
    rows = [torch.randn(n + 1, 5, generator=source).log_softmax(-1) for n in lengths]
    together = rule.rows(ChainDistributions.of(torch.cat(rows), chains))
    alone = [
        rule.rows(ChainDistributions.of(*each))
        for each in zip(rows, [[c] for c in chains], strict=True)
    ]
    assert torch.equal(together.thresholds, torch.cat([each.thresholds for each in alone]))
    assert torch.equal(together.residuals, torch.cat([each.residuals for each in alone]))


def test_chains_beyond_what_memory_allows_are_decided_in_turn(
    rule: ChainRule, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Distributions are points, so there is one right answer for each."""
    monkeypatch.setattr(rejection, "_MAX_DISTRIBUTION_ELEMENTS", 4 * 5)
    drawn = torch.zeros(3, 5).log_softmax(-1)
    chains = [DrawnChain.of(tokens, drawn[: len(tokens)]) for tokens in ((1, 2, 3), (4,), (0, 1))]
    log_probs = torch.full((9, 5), -torch.inf)
    for row, token in enumerate((1, 2, 0, 0, 4, 3, 0, 1, 2)):
        log_probs[row, token] = 0.0
    paths = accept_chains(log_probs, chains, rule, torch.Generator())
    assert [len(path.node_indices) for path in paths] == [2, 1, 2]
    assert [path.bonus_token_id for path in paths] == [0, 3, 2]


def test_a_drawn_chain_is_cut_by_depth_alone() -> None:
    distributions = torch.zeros(3, 4)
    chain = DrawnChain.of((1, 2, 3), distributions)
    cut = chain.only((0, 1))
    assert isinstance(cut, DrawnChain)
    assert cut.token_ids == (1, 2)
    assert cut.parent_indices == (None, 0)
    assert len(cut.draft_log_probs) == 2
    with pytest.raises(AssertionError, match="no depth"):
        chain.only((0, 2))


NUM_ROUNDS = 20_000


def first_tokens_p_value(rule: ChainRule, handed_over: float) -> float:
    """Chi-square of the first two tokens where a first one was accepted, else of the first.

    Args:
        handed_over: power of the draft's distribution that is handed over; 1 is the distribution
            itself.
    """
    source = torch.Generator().manual_seed(9)
    target = torch.randn(1 + 4, 4, generator=source).log_softmax(-1)
    draft = torch.randn(1 + 4, 4, generator=source).log_softmax(-1)
    first = torch.multinomial(draft[0].exp(), NUM_ROUNDS, replacement=True, generator=source)
    second = torch.multinomial(draft[1:].exp()[first], 1, generator=source)[:, 0]
    told = (draft * handed_over).log_softmax(-1)
    chains = [
        DrawnChain.of((one, two), told[[0, 1 + one]])
        for one, two in zip(first.tolist(), second.tolist(), strict=True)
    ]
    # The third row's distribution is of no interest here.
    rows = torch.stack([target[[0, 1 + one, 0]] for one in first.tolist()]).flatten(0, 1)
    paths = accept_chains(rows, chains, rule, torch.Generator().manual_seed(3))
    probs = target.exp()
    seconds = torch.multinomial(probs[1:], NUM_ROUNDS, replacement=True, generator=source).tolist()
    observed: Counter[Context] = Counter()
    for place, (chain, path) in enumerate(zip(chains, paths, strict=True)):
        tokens = path.token_ids(chain)[:2]
        # Where the round ends with the first token, the target draws the second.
        observed[tokens if len(tokens) == 2 else (*tokens, seconds[tokens[0]][place])] += 1
    expected = {
        (one, two): NUM_ROUNDS * float(probs[0, one] * probs[1 + one, two])
        for one, two in itertools.product(range(4), repeat=2)
    }
    return chi_square_p_value([observed[each] for each in expected], list(expected.values()))


def test_committed_tokens_follow_the_targets_distribution(rule: ChainRule) -> None:
    assert first_tokens_p_value(rule, handed_over=1.0) > 1e-3


def test_a_slightly_wrong_distribution_is_caught_by_statistics(rule: ChainRule) -> None:
    assert first_tokens_p_value(rule, handed_over=1.2) < 1e-6
