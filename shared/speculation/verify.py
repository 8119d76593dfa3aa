"""The coupled rule: which candidates the target accepts, and the bonus token after them.

Row 0 of a sequence is the root (its last committed token) and row i + 1 is node i. Every row has
drawn a token or has a law to draw from; the walk starts at the root and follows accepted children.
Siblings that hold the same token are allowed: the first one counts, the others are never reached,
which loses a little acceptance and nothing of the law.

Two rules live here. The coupled rule (`coupled_draw`, `accept_path`) keys the noise by seed and
position. The point-mass rule (`point_mass_draws`, `accept_point_mass`) uses fresh randomness and
has thresholds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from shared.speculation.distributions import shaped_logits, target_log_probs
from shared.speculation.noise import gumbel_noise
from shared.speculation.penalties import TokenCounts
from shared.speculation.row_sampling import RowSampling
from shared.tokens import TokenTree


@dataclass(frozen=True, slots=True)
class AcceptedPath:
    """The decision on one tree.

    Attributes:
        node_indices: accepted nodes, root's child first.
        bonus_token_id: the target's token after the last of them.
    """

    node_indices: tuple[int, ...]
    bonus_token_id: int

    def token_ids(self, tree: TokenTree) -> tuple[int, ...]:
        """Returns the tokens to commit: the accepted path, then the bonus."""
        return (*(tree.token_ids[node] for node in self.node_indices), self.bonus_token_id)


def draw_tokens(
    logits: Tensor,
    sampling: RowSampling,
    positions: Tensor,
    counts: TokenCounts | None = None,
) -> Tensor:
    """Returns each row's token `[R]` int64: the law of the logits, then the coupled draw.

    Greedy batches skip law and noise: one argmax. Arguments are those of `target_log_probs` and
    `coupled_draw`.
    """
    if sampling.all_greedy:
        return shaped_logits(logits, sampling, counts).argmax(dim=-1)
    return coupled_draw(target_log_probs(logits, sampling, counts), sampling.seeds, positions)


def coupled_draw(log_probs: Tensor, seeds: Tensor, positions: Tensor) -> Tensor:
    """Returns the token of each row, a function of its law, seed and position alone.

    The highest perturbed log probability is a draw from the law (the Gumbel-max trick). A row
    whose law is a point takes that token; the noise is finite, so a token of no mass never wins.

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

    Each row's drawn token is what plain decoding draws after the row's path, so the committed
    tokens are plain decoding's whatever the tree holds.

    Args:
        tree: the candidate; may be empty.
        drawn: token drawn by each row, `len(tree) + 1` of them.
    """
    assert len(drawn) == len(tree) + 1, f"{len(drawn)} drawn tokens for {len(tree)} nodes"
    children = first_children(tree)
    row = 0
    accepted: list[int] = []
    while (node := children.get((row, drawn[row]))) is not None:
        accepted.append(node)
        row = node + 1
    return AcceptedPath(tuple(accepted), drawn[row])


def first_children(tree: TokenTree) -> Mapping[tuple[int, int], int]:
    """Maps (row, token id) to the row's first child with that token, in node order."""
    children: dict[tuple[int, int], int] = {}
    for node, token_id in enumerate(tree.token_ids):
        parent = tree.parent_indices[node]
        children.setdefault((0 if parent is None else parent + 1, token_id), node)
    return children
