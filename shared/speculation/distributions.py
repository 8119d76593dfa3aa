"""From raw logits to the distribution that each row's token is drawn from.

The order, all of it per row:

1. repetition penalty, then frequency and presence penalties;
2. logit bias, so that a bias of 100 decides whatever the penalties say;
3. removed tokens: those that are not among the allowed ones, bad words, and stop tokens before the
   minimum length;
4. temperature;
5. top-k, then top-p over the renormalised rest, then min-p.

Steps 1 to 3 have SGLang's order, steps 4 and 5 that of transformers. vLLM adds the bias before the
penalties and applies min-p before top-k, so its distribution differs for a biased token under a
repetition penalty, and for requests with both min-p and top-p.

Of equal logits, truncation and greedy rows keep the lowest token id.

Raw logits may hold -inf for tokens that a grammar forbids, but not in a whole row.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from shared.speculation.penalties import TokenCounts, apply_penalties
from shared.speculation.row_sampling import RowSampling
from shared.speculation.truncation import keep_top


def target_log_probs(
    logits: Tensor, sampling: RowSampling, counts: TokenCounts | None = None
) -> Tensor:
    """Returns the log probabilities of each row.

    Args:
        logits: `[R, V]` raw logits of any float type.
        sampling: of the same R rows.
        counts: needed when a row has penalties.

    Returns:
        `[R, V]` float32, normalised, -inf for removed tokens; at least one token is left. A greedy
        row has all its mass on its highest logit.
    """
    logits = shaped_logits(logits, sampling, counts)
    if sampling.all_greedy:
        return _one_hot(logits)
    scaled = truncated(logits, sampling)
    return torch.where(sampling.greedy, _one_hot(logits), scaled.log_softmax(dim=-1))


def shaped_logits(
    logits: Tensor, sampling: RowSampling, counts: TokenCounts | None = None
) -> Tensor:
    """Returns `[R, V]` float32 logits after penalties, bias and removals (steps 1 to 3)."""
    logits = logits.to(torch.float32)
    if sampling.penalties is not None:
        assert counts is not None, "rows with penalties need token counts"
        logits = apply_penalties(logits, sampling.penalties, counts)
    if sampling.bias is not None:
        rows, token_ids, values = sampling.bias
        logits = logits.index_put((rows, token_ids), values, accumulate=True)
    return _allowed_only(logits, sampling)


def truncated(logits: Tensor, sampling: RowSampling) -> Tensor:
    """Returns `[R, V]` logits over temperature, highest 0, -inf beyond top-k, top-p and min-p.

    Greedy rows come out as if their temperature were 1e-5, with no promise on what is cut beside
    their highest logit, which stays.
    """
    # Subtracting the maximum first keeps a tiny temperature from overflowing into inf - inf.
    scaled = (logits - logits.amax(dim=-1, keepdim=True)) / sampling.temperatures
    kept = scaled
    if sampling.has_top_k or sampling.has_top_p:
        # Greedy rows may be cut too narrow by the width; their result is not used.
        width = min(sampling.max_top_k or scaled.shape[-1], scaled.shape[-1])
        top_ps = sampling.top_ps if sampling.has_top_p else None
        kept = keep_top(scaled, sampling.top_ks, top_ps, width=width)
    if sampling.has_min_p:
        kept = kept.masked_fill(scaled.exp() < sampling.min_ps, -math.inf)
    return kept


def _one_hot(logits: Tensor) -> Tensor:
    """All mass on the highest logit; torch.argmax takes the lowest index of equal ones."""
    best = logits.argmax(dim=-1, keepdim=True)
    return torch.full_like(logits, -math.inf).scatter_(-1, best, 0.0)


def _allowed_only(logits: Tensor, sampling: RowSampling) -> Tensor:
    """Removes tokens (step 3), except from a row that would have none left."""
    remaining = logits
    if sampling.allowed is not None:
        is_allowed = sampling.allowed.of_rows(logits.shape[-1])
        remaining = remaining.masked_fill(~is_allowed, -math.inf)
    if sampling.banned is not None:
        remaining = remaining.index_put(sampling.banned, logits.new_full((), -math.inf))
    if remaining is logits:
        return logits
    is_empty = (remaining == -math.inf).all(dim=-1, keepdim=True)
    return torch.where(is_empty, logits, remaining)
