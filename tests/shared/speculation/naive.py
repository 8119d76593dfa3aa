"""Oracles in plain Python, one row at a time, written from the definitions."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import TypeAlias

import torch

from shared.tokens import SamplingParams, TokenTree

Distribution: TypeAlias = Callable[[tuple[int, ...]], Sequence[float]]
Forest: TypeAlias = "tuple[tuple[int, Forest], ...]"


def naive_distribution(
    logits: Sequence[float],
    params: SamplingParams,
    *,
    prompt: Sequence[int] = (),
    output: Sequence[int] = (),
    banned: Sequence[int] = (),
) -> list[float]:
    """The distribution of the next token after `prompt + output`, in float64."""
    shaped = [_shaped(token, x, params, prompt, output) for token, x in enumerate(logits)]
    shaped = [-math.inf if token in banned else x for token, x in enumerate(shaped)]
    order = sorted(range(len(shaped)), key=lambda token: (-shaped[token], token))
    if params.temperature == 0:
        return [1.0 if token == order[0] else 0.0 for token in range(len(shaped))]
    weights = [math.exp((x - shaped[order[0]]) / params.temperature) for x in shaped]
    kept = order[: params.top_k] if params.top_k else order
    kept = _within_top_p(kept, weights, params.top_p)
    kept = [token for token in kept if weights[token] >= params.min_p * weights[order[0]]]
    total = sum(weights[token] for token in kept)
    return [weights[t] / total if t in kept else 0.0 for t in range(len(weights))]


def _shaped(
    token: int, logit: float, params: SamplingParams, prompt: Sequence[int], output: Sequence[int]
) -> float:
    if token in prompt or token in output:
        penalty = params.repetition_penalty
        logit = logit / penalty if logit > 0 else logit * penalty
    logit -= params.frequency_penalty * list(output).count(token)
    if token in output:
        logit -= params.presence_penalty
    return logit + params.logit_bias.get(token, 0.0)


def _within_top_p(order: list[int], weights: Sequence[float], top_p: float) -> list[int]:
    if top_p == 1.0:
        return order
    total = sum(weights[token] for token in order)
    kept: list[int] = []
    mass = 0.0
    for token in order:
        if kept and mass >= top_p * total:
            break
        kept.append(token)
        mass += weights[token]
    return kept


def every_tree(vocab_size: int, depth: int) -> Iterator[TokenTree]:
    """Every tree of distinct siblings up to a depth, siblings in order of token id."""
    for branches in _forests(vocab_size, depth):
        token_ids: list[int] = []
        parents: list[int | None] = []
        _flatten(branches, None, token_ids, parents)
        yield TokenTree(tuple(token_ids), tuple(parents))


def _forests(vocab_size: int, depth: int) -> list[Forest]:
    if depth == 0:
        return [()]
    below = _forests(vocab_size, depth - 1)
    choices = [[None, *((token, forest) for forest in below)] for token in range(vocab_size)]
    return [tuple(c for c in pick if c is not None) for pick in itertools.product(*choices)]


def _flatten(
    forest: Forest, parent: int | None, token_ids: list[int], parents: list[int | None]
) -> None:
    for token_id, below in forest:
        token_ids.append(token_id)
        parents.append(parent)
        _flatten(below, len(token_ids) - 1, token_ids, parents)


def row_contexts(tree: TokenTree) -> list[tuple[int, ...]]:
    """Tokens from the root's child to each row, by walking up from every node."""
    nodes = [tuple(tree.token_ids[n] for n in tree.path(node)) for node in range(len(tree))]
    return [(), *nodes]


def chi_square_p_value(observed: Sequence[float], expected: Sequence[float]) -> float:
    """Probability of a statistic at least this large when `expected` is the distribution's counts.

    Cells expected to be empty must be empty: one hit there is a p-value of 0.
    """
    if any(e == 0 and o > 0 for o, e in zip(observed, expected, strict=True)):
        return 0.0
    cells = [(o, e) for o, e in zip(observed, expected, strict=True) if e > 0]
    statistic = sum((o - e) ** 2 / e for o, e in cells)
    half = torch.tensor([(len(cells) - 1) / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1]))


def joint_distribution(
    distribution: Distribution, vocab_size: int, length: int
) -> dict[tuple[int, ...], float]:
    """Probability of every continuation of a length."""
    return {
        tokens: math.prod(distribution(tokens[:i])[tokens[i]] for i in range(length))
        for tokens in itertools.product(range(vocab_size), repeat=length)
    }
