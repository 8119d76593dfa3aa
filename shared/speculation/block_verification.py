"""Block verification: one decision on a whole chain, which accepts no less than token by token.

Rejection gives up at the first token that fails, though the tokens after it may make up for it.
Here a node's threshold weighs the path down to it, and the deepest node whose coin passes is taken
with everything above it. Rows, nodes and distributions are those of `rejection`.

Source: Sun et al., arXiv 2403.10444, algorithm 2 and equations 3 to 5.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from shared.speculation.rejection import ChainDistributions, ChainRows, ChainRule
from shared.speculation.upload import uploaded, uploaded_ids


def path_weights(ratios: Tensor, lengths: Sequence[int]) -> Tensor:
    """Returns `[N]` float64 in [0, 1], for each node the joint ratio of the path down to it: the
    ratio of its token times what is above it, never more than 1."""
    depth = max(lengths)
    places = uploaded_ids(
        [chain * depth + place for chain, n in enumerate(lengths) for place in range(n)],
        ratios.device,
    )
    padded = ratios.new_ones(len(lengths) * depth).index_copy_(0, places, ratios)
    levels = padded.view(len(lengths), depth)
    for above, level in itertools.pairwise((torch.ones_like(levels[:, 0]), *levels.unbind(1))):
        level.mul_(above).clamp_max_(1.0)
    return padded.index_select(0, places)


def block_rows(distributions: ChainDistributions) -> ChainRows:
    """Returns thresholds and residuals of algorithm 2.

    At a node of weight w that is not the last, the target's distribution times w exceeds the
    draft's distribution of the next token by a mass m, and the threshold is m / (m + 1 - w); the
    last one's is w. Nothing is left of 1 - w where w is 1: the threshold is 1, and if m is 0 as
    well, the next node has weight 1 and a later one is taken.
    """
    weights = path_weights(distributions.ratios(), distributions.lengths)
    own_rows = distributions.rows_above_nodes() + 1
    row_weights = torch.ones_like(distributions.target_probs[:, :1]).index_copy_(
        0, own_rows, weights.unsqueeze(1)
    )
    residuals = (row_weights * distributions.target_probs - distributions.draft_probs).clamp_min_(
        0.0
    )
    masses = residuals.sum(-1).index_select(0, own_rows)
    thresholds = torch.where(weights < 1.0, masses / (masses + 1.0 - weights), 1.0)
    is_last = uploaded(
        torch.tensor(
            [place == length - 1 for length in distributions.lengths for place in range(length)]
        ),
        weights.device,
    )
    return ChainRows.of(distributions, torch.where(is_last, weights, thresholds), residuals)


def num_up_to_last_pass(passes: Sequence[bool]) -> int:
    """Returns how many nodes the deepest one that passes takes along, itself included."""
    return max((place + 1 for place, each in enumerate(passes) if each), default=0)


BLOCK = ChainRule(block_rows, num_up_to_last_pass)
