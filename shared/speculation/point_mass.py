"""The point-mass rule: fresh randomness, children accepted by the target's probability of them.

The draft's choice of children counts as certain, so no draft probabilities are needed. The rule has
thresholds; below 1 they trade the target's law for acceptance. Row 0 of a tree is its root and row
i + 1 is node i.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shared.errors import InvalidArgument
from shared.speculation.tree import row_parents
from shared.speculation.verify import AcceptedPath, coupled_draw, first_children
from shared.tokens import TokenTree

_COIN_SIDES = 2**52


@dataclass(frozen=True, slots=True)
class Thresholds:
    """How far the point-mass rule may leave the target's law.

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

    @property
    def is_lossless(self) -> bool:
        return self.single == 1.0 and self.acc == 1.0


EXACT = Thresholds()


@dataclass(frozen=True, slots=True)
class PointMassDraws:
    """What the point-mass rule needs of one tree's rows, on the host.

    Attributes:
        node_probs: the target's probability of each node given its parent.
        residual_token_ids: for each row a token drawn from its law without its children; None
            where the children hold all the mass. A leaf's is a plain draw.
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
        generator: of the host; the source of fresh randomness.
    """
    row_starts = _starts([len(tree) + 1 for tree in trees])
    rows = [
        start + parent
        for start, tree in zip(row_starts, trees, strict=False)
        for parent in row_parents(tree)[1:]
        if parent is not None
    ]
    token_ids = [token_id for tree in trees for token_id in tree.token_ids]
    row_index = torch.tensor(rows, dtype=torch.int64, device=log_probs.device)
    token_index = torch.tensor(token_ids, dtype=torch.int64, device=log_probs.device)
    node_probs = log_probs[row_index, token_index].to(torch.float64).exp()
    residual = log_probs.index_put((row_index, token_index), log_probs.new_full((), -math.inf))
    has_mass = (residual > -math.inf).any(dim=-1)
    drawn = _fresh_draw(residual, generator)
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
    follows another law.

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


def fresh_coins(num_coins: int, generator: torch.Generator) -> tuple[float, ...]:
    """Returns uniform float64 numbers strictly inside (0, 1): odd multiples of 2^-53."""
    sides = torch.randint(_COIN_SIDES, (num_coins,), generator=generator, dtype=torch.int64)
    return tuple(((sides.to(torch.float64) + 0.5) / _COIN_SIDES).tolist())


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
    """Returns for each row its children the target may draw, repeated tokens left out."""
    first = first_children(tree)
    children: list[list[int]] = [[] for _ in range(len(tree) + 1)]
    for (row, _), node in first.items():
        if node_probs[node] > 0.0:
            children[row].append(node)
    return children


def _fresh_draw(log_probs: Tensor, generator: torch.Generator) -> Tensor:
    """Draws each row's token with noise under a seed used once."""
    num_rows = log_probs.shape[0]
    low, high = -(2**63), 2**63 - 1
    seeds = torch.randint(low, high, (num_rows,), generator=generator, dtype=torch.int64)
    seeds = seeds.to(log_probs.device)
    return coupled_draw(log_probs, seeds, torch.zeros_like(seeds))


def _starts(counts: Sequence[int]) -> list[int]:
    starts = [0]
    for count in counts:
        starts.append(starts[-1] + count)
    return starts


def _split_draws(
    packed: Sequence[float],
    coins: Sequence[float],
    trees: Sequence[TokenTree],
    row_starts: Sequence[int],
) -> tuple[PointMassDraws, ...]:
    """Cuts `[node probs | residual tokens | has mass]` into one part for each tree."""
    num_nodes, num_rows = sum(len(tree) for tree in trees), row_starts[-1]
    tokens = packed[num_nodes : num_nodes + num_rows]
    has_mass = packed[num_nodes + num_rows :]
    residual = [int(t) if m else None for t, m in zip(tokens, has_mass, strict=True)]
    node_starts = _starts([len(tree) for tree in trees])
    return tuple(
        PointMassDraws(
            node_probs=tuple(packed[node_starts[i] : node_starts[i + 1]]),
            residual_token_ids=tuple(residual[row_starts[i] : row_starts[i + 1]]),
            coins=tuple(coins[row_starts[i] : row_starts[i + 1]]),
        )
        for i in range(len(trees))
    )
