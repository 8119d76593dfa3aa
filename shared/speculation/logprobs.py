"""Log probabilities for the client, from the target's raw logits before any sampling parameter."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from shared.speculation.distributions import stable_topk
from shared.speculation.row_sampling import uploaded_ids
from shared.tokens import TokenLogprobs


def packed_logprobs(
    logits: Tensor, token_ids: Tensor, width: int, named: Sequence[Sequence[int]] = ()
) -> Tensor:
    """Computes log probabilities for `unpacked_logprobs`. Does not wait for the device.

    Args:
        logits: `[R, V]` raw logits of any float type.
        token_ids: `[R]` int64.
        width: number of alternatives of each row.
        named: R lists of further tokens to report log probabilities of; empty for none.

    Returns:
        `[R, 2 + 2 * min(width, V) + K]` float64: log probability, rank, then values and ids of the
        alternatives, then values of up to K named tokens. Ids and ranks are exact in float64, so
        one transfer is enough.
    """
    log_probs = logits.to(torch.float32).log_softmax(dim=-1)
    chosen_ids = token_ids.unsqueeze(1)
    chosen = log_probs.gather(1, chosen_ids)
    ranks = (log_probs > chosen).sum(dim=1, keepdim=True) + 1
    width = min(width, logits.shape[-1])
    if width:
        top_values, top_ids = stable_topk(log_probs, width)
    else:
        top_values, top_ids = chosen[:, :0], chosen_ids[:, :0]
    parts = [chosen, ranks, top_values, top_ids]
    if any(named):
        count = _most(named)
        padded = [token_id for ids in named for token_id in (*ids, *[0] * (count - len(ids)))]
        index = uploaded_ids(padded, logits.device).view(len(named), count)
        parts.append(log_probs.gather(1, index))
    return torch.cat([part.double() for part in parts], dim=1)


def unpacked_logprobs(
    packed: Tensor, num_top: Sequence[int], named: Sequence[Sequence[int]] = ()
) -> tuple[TokenLogprobs, ...]:
    """Returns the log probabilities of each row.

    Args:
        packed: see `packed_logprobs`; on the host.
        num_top: number of alternatives to return for each row.
        named: the same as in `packed_logprobs`.
    """
    width = (packed.shape[1] - 2 - _most(named)) // 2
    return tuple(
        _row(row, width, count, own)
        for row, count, own in zip(
            packed.tolist(), num_top, named or [()] * len(num_top), strict=True
        )
    )


def _most(named: Sequence[Sequence[int]]) -> int:
    return max(map(len, named), default=0)


def _row(packed: Sequence[float], width: int, num_top: int, named: Sequence[int]) -> TokenLogprobs:
    log_prob, rank, *rest = packed
    values, ids, named_values = rest[:width], rest[width : 2 * width], rest[2 * width :]
    top = tuple((int(i), v) for i, v in zip(ids, values, strict=True))
    further = tuple(zip(named, named_values, strict=False))
    return TokenLogprobs(log_prob=log_prob, rank=int(rank), top=top[:num_top] + further)
