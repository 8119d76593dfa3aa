"""From raw target logits to the law each row's token is drawn from.

The order, all of it per row:

1. repetition penalty, then frequency and presence penalties;
2. logit bias, so that a bias of 100 decides whatever the penalties say;
3. banned tokens (stop tokens before the minimum length);
4. temperature;
5. top-k, then top-p over the renormalised rest, then min-p.

Users of SGLang find its order of steps 1 to 3, and users of transformers theirs of 4 and 5. vLLM
adds the bias before the penalties and cuts by min-p before top-k, so its law differs only for a
biased token under a repetition penalty, and for requests with both min-p and top-p.

Among equal logits the lowest token id survives a cut first, and a greedy row takes the lowest id:
bfloat16 logits tie often, and a cut that depended on the device would break reproducibility. For
the same reason top-p sums integers, whose sum does not depend on the order of the additions.

Raw logits may hold -inf for tokens that a grammar forbids, but not in a whole row.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from shared.speculation.penalties import TokenCounts, apply_penalties
from shared.speculation.row_sampling import RowSampling

# Mass of the most probable token in integer units. A row of 2^18 such tokens sums to 2^62.
_MASS_UNIT = 2.0**44


def target_log_probs(
    logits: Tensor, sampling: RowSampling, counts: TokenCounts | None = None
) -> Tensor:
    """Returns the log of each row's law.

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
    """Returns `[R, V]` float32 logits after penalties, bias and bans (steps 1 to 3)."""
    logits = logits.to(torch.float32)
    if sampling.penalties is not None:
        assert counts is not None, "rows with penalties need token counts"
        logits = apply_penalties(logits, sampling.penalties, counts)
    if sampling.bias is not None:
        rows, token_ids, values = sampling.bias
        logits = logits.index_put((rows, token_ids), values, accumulate=True)
    if sampling.banned is not None:
        logits = _without_banned(logits, *sampling.banned)
    return logits


def truncated(logits: Tensor, sampling: RowSampling) -> Tensor:
    """Returns `[R, V]` logits over temperature, highest 0, -inf beyond top-k, top-p and min-p.

    Greedy rows come out as if their temperature were 1e-5, with no promise on what is cut beside
    their highest logit, which stays.
    """
    # Subtracting the maximum first keeps a tiny temperature from overflowing into inf - inf.
    scaled = (logits - logits.amax(dim=-1, keepdim=True)) / sampling.temperatures
    kept = scaled
    if sampling.has_top_k or sampling.has_top_p:
        kept = _keep_highest(scaled, _num_kept(scaled, sampling))
    if sampling.has_min_p:
        kept = kept.masked_fill(scaled.exp() < sampling.min_ps, -math.inf)
    return kept


def _num_kept(scaled: Tensor, sampling: RowSampling) -> tuple[Tensor, Tensor]:
    """Returns how many tokens top-k and top-p keep `[R, 1]`, and the lowest kept value `[R, 1]`.

    Both keep a prefix of the tokens in descending order, so a count says it all.
    """
    vocab_size = scaled.shape[-1]
    width = min(sampling.max_top_k or vocab_size, vocab_size)
    # Greedy rows have no top-k, but their result is not used: their width may be cut too.
    ordered = _descending(scaled, width)
    num_kept = sampling.top_ks.clamp_max(width)
    if sampling.has_top_p:
        ranks = torch.arange(width, device=scaled.device)
        masses = (ordered.exp().to(torch.float64) * _MASS_UNIT).to(torch.int64)
        sums = masses.masked_fill(ranks >= num_kept, 0).cumsum(dim=-1)
        needed = (sums[:, -1:].to(torch.float64) * sampling.top_ps).to(torch.int64)
        # A token stays while the mass before it has not reached top-p, so the first always does.
        num_in_mass = (sums - masses < needed).sum(dim=-1, keepdim=True).clamp_min(1)
        within = torch.where(sampling.top_ps < 1.0, num_in_mass, width)
        num_kept = torch.minimum(num_kept, within)
    return num_kept, ordered.gather(-1, num_kept - 1)


def _descending(values: Tensor, width: int) -> Tensor:
    if width == values.shape[-1]:
        return values.sort(dim=-1, descending=True).values
    return values.topk(width, dim=-1, sorted=True).values


def _keep_highest(scaled: Tensor, border: tuple[Tensor, Tensor]) -> Tensor:
    """Keeps the highest `num_kept` values; at the lowest kept value the lowest ids stay."""
    num_kept, lowest = border
    above = scaled > lowest
    tied = scaled == lowest
    num_tied_kept = num_kept - above.sum(dim=-1, keepdim=True)
    # Inclusive counts: the j-th tied token stays while j <= num_tied_kept.
    kept = above | (tied & (tied.cumsum(dim=-1) <= num_tied_kept))
    return scaled.masked_fill(~kept, -math.inf)


def _one_hot(logits: Tensor) -> Tensor:
    """All mass on the highest logit; torch.argmax takes the lowest index of equal ones."""
    best = logits.argmax(dim=-1, keepdim=True)
    return torch.full_like(logits, -math.inf).scatter_(-1, best, 0.0)


def _without_banned(logits: Tensor, rows: Tensor, token_ids: Tensor) -> Tensor:
    """Removes banned tokens, except in a row that would have none left."""
    remaining = logits.index_put((rows, token_ids), logits.new_full((), -math.inf))
    is_empty = (remaining == -math.inf).all(dim=-1, keepdim=True)
    return torch.where(is_empty, logits, remaining)
