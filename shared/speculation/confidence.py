"""The score by which a draft ranks candidates: how likely the target accepts each.

Scores of one row are log probabilities of disjoint events, so they sum along a path to the log
probability that the whole path is accepted, which is what tree growth ranks by.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from shared.speculation.distributions import shaped_logits, target_log_probs, truncated
from shared.speculation.penalties import TokenCounts
from shared.speculation.row_sampling import RowSampling


def coupled_confidence(
    logits: Tensor,
    sampling: RowSampling,
    noise: Tensor | None,
    counts: TokenCounts | None = None,
) -> Tensor:
    """Returns the log probability that the coupled rule accepts each token.

    The target takes the argmax of `target_logits + T * noise`, and the draft knows T and the noise.
    What it does not know is how far the target's logits are from its own. At T = 0 EAGLE-2 ranks by
    the softmax of the draft's logits l; that is the chance of the argmax if the target's logits are
    l plus independent unit Gumbel errors. The same errors at T > 0 make the chance of token v

        P(argmax(l + error + T * noise) = v) = softmax(l + T * noise)_v,

    so the noise enters as a known shift of the logits and the greedy score is the case T = 0. The
    first child is then the token the draft itself would draw, and its score says how clearly it
    leads. Ranking by the plain draft probability instead would ignore what the noise tells: a
    likely token with bad noise would go first although the draft expects it to lose.

    The error of a real draft need not have unit scale; that bends the scores alike in every row, as
    it does for greedy EAGLE-2.

    Args:
        logits: `[R, V]` raw draft logits.
        sampling: of the same R rows. The draft may leave out what costs it more than it gains.
        noise: `[R, V]` float32 noise of each row's seed and the position of the tokens scored, the
            same that the target will use; rows of one sequence and level share it. None when every
            row is greedy.
        counts: needed when a row has penalties.

    Returns:
        `[R, V]` float32, -inf for tokens the row's sampling parameters remove.
    """
    logits = shaped_logits(logits, sampling, counts)
    if sampling.all_greedy:
        return logits.log_softmax(dim=-1)
    assert noise is not None, "drawing rows need the noise the target will use"
    temperatures = torch.where(sampling.greedy, 0.0, sampling.temperatures)
    removed = ~sampling.greedy & (truncated(logits, sampling) == -math.inf)
    shifted = logits + temperatures * noise
    return shifted.masked_fill(removed, -math.inf).log_softmax(dim=-1)


def point_mass_confidence(
    logits: Tensor, sampling: RowSampling, counts: TokenCounts | None = None
) -> Tensor:
    """Returns the log probability that the point-mass rule accepts each token.

    That rule accepts a child with the target's probability of it, so the draft's estimate of that
    probability is the score. Arguments and result are those of `coupled_confidence`.
    """
    plain = shaped_logits(logits, sampling, counts).log_softmax(dim=-1)
    if sampling.all_greedy:
        return plain
    return torch.where(sampling.greedy, plain, target_log_probs(logits, sampling, counts))
