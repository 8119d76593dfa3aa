"""Computes the accepted candidates and the bonus token after them.

Row 0 of a sequence is the root (its last committed token) and row i + 1 is node i. Every row has
drawn a token or has a distribution to draw from; the walk starts at the root and follows accepted
children. Siblings that hold the same token are allowed: the first one counts, the others are never
reached. That costs a little acceptance and leaves the output distribution exact.

There are two rules. The coupled rule (`coupled_draw`, `accept_path`) keys the noise by seed and
position. The point-mass rule (`point_mass_draws`, `accept_point_mass`) uses fresh randomness and
has thresholds.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from shared.errors import InvalidArgument
from shared.speculation.distributions import (
    fresh_coins,
    fresh_seeds,
    gumbel_noise,
    shaped_logits,
    truncated,
)
from shared.speculation.row_sampling import RowSampling, TokenCounts, uploaded_ids, uploaded_tensor
from shared.speculation.tree import row_parents
from shared.tokens import TokenTree


@dataclass(frozen=True, slots=True)
class AcceptedPath:
    """The decision on one tree.

    Attributes:
        node_indices: accepted nodes, the root's child first.
        bonus_token_id: the target's token after the last accepted node.
    """

    node_indices: tuple[int, ...]
    bonus_token_id: int

    def token_ids(self, tree: TokenTree) -> tuple[int, ...]:
        """Returns the tokens to commit: the accepted path, then the bonus."""
        return (*(tree.token_ids[node] for node in self.node_indices), self.bonus_token_id)


@dataclass(frozen=True, slots=True)
class Thresholds:
    """The bounds within which the point-mass rule may leave the target's distribution.

    Attributes:
        single: in (0, 1]; a child at least this probable is accepted outright.
        acc: in (0, 1]; divides the accumulated probability of the children tried so far.
    """

    single: float = 1.0
    acc: float = 1.0

    def __post_init__(self) -> None:
        for name, value in (("single", self.single), ("acc", self.acc)):
            if not 0.0 < value <= 1.0:
                raise InvalidArgument.out_of_range(f"accept_threshold_{name}", value, "(0, 1]")


EXACT = Thresholds()


def draw_tokens(
    logits: Tensor,
    sampling: RowSampling,
    positions: Tensor,
    counts: TokenCounts | None = None,
) -> Tensor:
    """Returns each row's token `[R]` int64: the draw of `coupled_draw` from the logits'
    distribution.

    It does not normalise the distribution, which would add one number to a whole row and so move no
    argmax. Greedy batches skip distribution and noise. Arguments are those of `target_log_probs`
    and `coupled_draw`.
    """
    if logits.is_cuda and sampling.is_plain:
        # Triton is not installed where there is no CUDA.
        from shared.speculation.draw_triton import fused_draw

        return fused_draw(logits, None if sampling.all_greedy else sampling, positions)
    logits = shaped_logits(logits, sampling, counts)
    if sampling.all_greedy:
        return logits.argmax(dim=-1)
    noise = gumbel_noise(sampling.seeds, positions, logits.shape[-1])
    drawn = (truncated(logits, sampling) + noise).argmax(dim=-1)
    return torch.where(sampling.greedy.squeeze(1), logits.argmax(dim=-1), drawn)


def coupled_draw(log_probs: Tensor, seeds: Tensor, positions: Tensor) -> Tensor:
    """Returns the token of each row, a function of its distribution, seed and position alone.

    The highest perturbed log probability is a draw from the distribution (the Gumbel-max trick). A
    row whose distribution is a point takes that token; the noise is finite, so a token of no mass
    never wins.

    Args:
        log_probs: `[R, V]` float32, see `target_log_probs`.
        seeds: `[R]` int64.
        positions: `[R]` int64, absolute position of the drawn token.

    Returns:
        `[R]` int64; the lowest id on ties.

    Source: Daliri, Musco, Suresh, arXiv 2408.07978, section 3 (Gumbel sampling without
    communication).
    """
    noise = gumbel_noise(seeds, positions, log_probs.shape[-1])
    return (log_probs + noise).argmax(dim=-1)


def accept_path(tree: TokenTree, drawn: Sequence[int]) -> AcceptedPath:
    """Returns the path whose tokens are the ones the target drew.

    Each row draws the token that plain decoding draws after the row's path. So the committed tokens
    are those of plain decoding, whatever the tree holds.

    Args:
        tree: the candidate; may be empty.
        drawn: the token drawn by each of the `len(tree) + 1` rows.
    """
    assert len(drawn) == len(tree) + 1, f"{len(drawn)} drawn tokens for {len(tree)} nodes"
    children = _first_children(tree)
    row = 0
    accepted: list[int] = []
    while (node := children.get((row, drawn[row]))) is not None:
        accepted.append(node)
        row = node + 1
    return AcceptedPath(tuple(accepted), drawn[row])


@dataclass(frozen=True, slots=True)
class PointMassDraws:
    """The host-side inputs of the point-mass rule for one tree's rows.

    Attributes:
        node_probs: the target's probability of each node given its parent.
        residual_token_ids: for each row a token drawn from its distribution without its children;
            None where the children hold all the mass. For a leaf it is a plain draw.
        coins: for each row a number strictly inside (0, 1).
    """

    node_probs: tuple[float, ...]
    residual_token_ids: tuple[int | None, ...]
    coins: tuple[float, ...]


def point_mass_draws(
    log_probs: Tensor, trees: Sequence[TokenTree], generator: torch.Generator
) -> tuple[PointMassDraws, ...]:
    """Returns each tree's draws. Waits for the device once, for its results.

    Args:
        log_probs: `[R, V]` float32, the rows of the trees one after another.
        trees: the candidates, empty ones included.
        generator: the host's source of fresh randomness.
    """
    row_starts = [*accumulate((len(tree) + 1 for tree in trees), initial=0)]
    rows = [
        start + parent
        for start, tree in zip(row_starts, trees, strict=False)
        for parent in row_parents(tree)[1:]
        if parent is not None
    ]
    token_ids = [token_id for tree in trees for token_id in tree.token_ids]
    row_index = uploaded_ids(rows, log_probs.device)
    token_index = uploaded_ids(token_ids, log_probs.device)
    node_probs = log_probs[row_index, token_index].to(torch.float64).exp()
    residual = log_probs.index_put((row_index, token_index), log_probs.new_full((), -math.inf))
    has_mass = (residual > -math.inf).any(dim=-1)
    seeds = uploaded_tensor(fresh_seeds(row_starts[-1], generator), log_probs.device)
    drawn = coupled_draw(residual, seeds, torch.zeros_like(seeds))
    coins = fresh_coins(row_starts[-1], generator)
    # One transfer instead of three: token ids and flags are exact in float64.
    packed = torch.cat((node_probs, drawn.to(torch.float64), has_mass.to(torch.float64))).tolist()
    return _split_draws(packed, coins, trees, row_starts)


def accept_point_mass(
    tree: TokenTree, draws: PointMassDraws, thresholds: Thresholds = EXACT
) -> AcceptedPath:
    """Returns the path the coins accept.

    At a row with children of target probability p1, p2, … a coin u accepts child i when
    p1 + … + p(i-1) < u <= p1 + … + pi, so with probability pi; else, with the probability
    1 - sum(p) that is left, the bonus is drawn from the target without the children, renormalised,
    and token v comes with (1 - sum(p)) * pv / (1 - sum(p)) = pv. So every token has the target's
    probability, and by induction over the rows, whose coins are independent, so has every
    continuation: exact when both thresholds are 1. Below 1 children are favoured and the output
    follows another distribution.

    Rounding cannot produce a token the target forbids: a coin is never 0 or 1, a child without
    mass is never accepted, and where the children hold all the mass the last one with mass takes
    what rounding leaves above their sum.

    Source: the rule SGLang uses for EAGLE trees; rejection with a deterministic draft is the case
    of one child of Leviathan et al., arXiv 2211.17192, algorithm 1.
    """
    children = _children_with_mass(tree, draws.node_probs)
    row = 0
    accepted: list[int] = []
    while (node := _accepted_child(children[row], row, draws, thresholds)) is not None:
        accepted.append(node)
        row = node + 1
    bonus = draws.residual_token_ids[row]
    assert bonus is not None, f"row {row} has no mass at all"
    return AcceptedPath(tuple(accepted), bonus)


def _accepted_child(
    children: Sequence[int], row: int, draws: PointMassDraws, thresholds: Thresholds
) -> int | None:
    coin = draws.coins[row]
    accumulated = 0.0
    for node in children:
        prob = draws.node_probs[node]
        accumulated += prob
        if coin <= accumulated / thresholds.acc or prob >= thresholds.single:
            return node
    has_residual = draws.residual_token_ids[row] is not None
    return None if has_residual or not children else children[-1]


def _children_with_mass(tree: TokenTree, node_probs: Sequence[float]) -> list[list[int]]:
    """Returns for each row the children that the target may draw, without repeated tokens."""
    first = _first_children(tree)
    children: list[list[int]] = [[] for _ in range(len(tree) + 1)]
    for (row, _), node in first.items():
        if node_probs[node] > 0.0:
            children[row].append(node)
    return children


def _first_children(tree: TokenTree) -> Mapping[tuple[int, int], int]:
    """Maps (row, token id) to the row's first child with that token, in node order."""
    children: dict[tuple[int, int], int] = {}
    for node, token_id in enumerate(tree.token_ids):
        parent = tree.parent_indices[node]
        children.setdefault((0 if parent is None else parent + 1, token_id), node)
    return children


def _split_draws(
    packed: Sequence[float],
    coins: Sequence[float],
    trees: Sequence[TokenTree],
    row_starts: Sequence[int],
) -> tuple[PointMassDraws, ...]:
    """Splits `[node probs | residual tokens | has mass]` into one part for each tree."""
    num_nodes, num_rows = sum(len(tree) for tree in trees), row_starts[-1]
    tokens = packed[num_nodes : num_nodes + num_rows]
    has_mass = packed[num_nodes + num_rows :]
    residual = [int(t) if m else None for t, m in zip(tokens, has_mass, strict=True)]
    node_starts = [*accumulate(map(len, trees), initial=0)]
    return tuple(
        PointMassDraws(
            node_probs=tuple(packed[node_starts[i] : node_starts[i + 1]]),
            residual_token_ids=tuple(residual[row_starts[i] : row_starts[i + 1]]),
            coins=tuple(coins[row_starts[i] : row_starts[i + 1]]),
        )
        for i in range(len(trees))
    )
