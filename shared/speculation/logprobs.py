"""Log probabilities for the client, from the target's raw logits before any sampling parameter."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from shared.speculation.topk import stable_topk
from shared.tokens import TokenLogprobs


def token_logprobs(
    logits: Tensor, token_ids: Sequence[int], num_top: Sequence[int]
) -> tuple[TokenLogprobs, ...]:
    """Returns the log probability, rank and best alternatives of each row's token.

    Waits for the device once. Call it with the committed rows only.

    Args:
        logits: `[R, V]` raw logits of any float type.
        token_ids: R committed tokens.
        num_top: R counts of alternatives wanted, each in [0, MAX_TOP_LOGPROBS].
    """
    assert logits.shape[0] == len(token_ids) == len(num_top)
    log_probs = logits.to(torch.float32).log_softmax(dim=-1)
    chosen_ids = torch.tensor(token_ids, dtype=torch.int64, device=logits.device).unsqueeze(1)
    chosen = log_probs.gather(1, chosen_ids)
    ranks = (log_probs > chosen).sum(dim=1, keepdim=True) + 1
    width = min(max(num_top, default=0), logits.shape[-1])
    if width:
        top_values, top_ids = stable_topk(log_probs, width)
    else:
        top_values, top_ids = chosen[:, :0], chosen_ids[:, :0]
    # Ids and ranks are exact in float64, so one transfer brings everything.
    packed = torch.cat([part.double() for part in (chosen, ranks, top_values, top_ids)], dim=1)
    return tuple(
        _row(row, width, count) for row, count in zip(packed.tolist(), num_top, strict=True)
    )


def _row(packed: Sequence[float], width: int, num_top: int) -> TokenLogprobs:
    log_prob, rank, *rest = packed
    values, ids = rest[:width], rest[width:]
    top = tuple((int(i), v) for i, v in zip(ids, values, strict=True))
    return TokenLogprobs(log_prob=log_prob, rank=int(rank), top=top[:num_top])
