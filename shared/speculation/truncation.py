"""Top-k and top-p as one cut of the descending order.

Both keep the first tokens of the order by (logit, then lowest id), so a count of kept tokens says
it all, and the ids are needed only among the tokens that tie at the border. bfloat16 logits tie
often; a cut that left ties to the device would not be reproducible.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

# Mass of the most probable token in integer units. A row of 2^18 such tokens sums to 2^62.
_MASS_UNIT = 2.0**44


def keep_top(scaled: Tensor, top_ks: Tensor, top_ps: Tensor | None, *, width: int) -> Tensor:
    """Returns `scaled` with -inf outside top-k, then outside top-p of the renormalised rest.

    Args:
        scaled: `[R, V]` float32 logits over temperature, the highest of a row 0.
        top_ks: `[R, 1]` int64, at least 1; more than V is off.
        top_ps: `[R, 1]` float64 in (0, 1], 1 is off; None when off in every row.
        width: tokens to order; no less than each row's top-k where that is on, else V. Rows that
            ask for more keep `width` tokens.
    """
    ordered = _descending(scaled, width)
    num_kept = top_ks.clamp_max(width)
    if top_ps is not None:
        num_kept = torch.where(top_ps < 1.0, _num_in_mass(ordered, num_kept, top_ps), num_kept)
    return _keep_highest(scaled, num_kept, lowest=ordered.gather(-1, num_kept - 1))


def _num_in_mass(ordered: Tensor, num_kept: Tensor, top_ps: Tensor) -> Tensor:
    """Returns `[R, 1]` the fewest of the first `num_kept` tokens whose share reaches top-p.

    Masses are summed as integers: their sums are the same in any order of the additions, which a
    parallel scan of floats does not promise.
    """
    ranks = torch.arange(ordered.shape[-1], device=ordered.device)
    masses = (ordered.exp().to(torch.float64) * _MASS_UNIT).to(torch.int64)
    masses = masses.masked_fill(ranks >= num_kept, 0)
    sums = masses.cumsum(dim=-1)
    needed = sums[:, -1:].to(torch.float64) * top_ps
    # A token stays while the mass before it has not reached top-p, so the first always does.
    is_short = (sums - masses).to(torch.float64) < needed
    return torch.minimum(is_short.sum(dim=-1, keepdim=True), num_kept)


def _descending(values: Tensor, width: int) -> Tensor:
    if width == values.shape[-1]:
        return values.sort(dim=-1, descending=True).values
    return values.topk(width, dim=-1, sorted=True).values


def _keep_highest(scaled: Tensor, num_kept: Tensor, *, lowest: Tensor) -> Tensor:
    """Keeps the `num_kept` highest values; at the lowest kept value the lowest ids stay."""
    above = scaled > lowest
    tied = scaled == lowest
    num_tied_kept = num_kept - above.sum(dim=-1, keepdim=True)
    # Inclusive counts: the j-th tied token stays while j <= num_tied_kept.
    kept = above | (tied & (tied.cumsum(dim=-1) <= num_tied_kept))
    return scaled.masked_fill(~kept, -math.inf)
