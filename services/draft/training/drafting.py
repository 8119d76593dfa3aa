"""Drafts at every position of a text at once, by the mathematics of training."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from services.draft.training.block_head import BlockHead
from services.draft.training.frozen_target import FrozenTarget
from services.draft.training.heads import Head
from services.draft.training.recurrent_head import RecurrentHead, Unrolling


@torch.inference_mode()
def draft_chains(head: Head, target: FrozenTarget, token_ids: Tensor, *, num_steps: int) -> Tensor:
    """Returns `[N - 1, K]` int64; row i holds the greedy draft behind token i + 1, made with the
    features of positions 0 … i.

    Args:
        token_ids: `[N]` int64, N at least 2.
        num_steps: K for heads that draft a token at a time; blocks have their own.
    """
    rows = target.read(token_ids.unsqueeze(0), head.shape.feature_layers)
    if isinstance(head, BlockHead):
        anchors = torch.arange(1, len(token_ids), device=token_ids.device).unsqueeze(0)
        states = head(target.embedding, rows.token_ids, rows.features.float(), anchors)
        return F.linear(states[0], target.lm_head.float()).argmax(-1)
    hidden = head.fuse(rows.features[:, :-1].float())
    return recurrent_chains(head, target, rows.token_ids[:, 1:], hidden, num_steps)[0]


class TargetEnds(Protocol):
    """Embedding and lm_head of a target, `[V, H]` each."""

    @property
    def embedding(self) -> Tensor: ...
    @property
    def lm_head(self) -> Tensor: ...


def recurrent_chains(
    head: RecurrentHead, target: TargetEnds, known: Tensor, hidden: Tensor, num_steps: int
) -> Tensor:
    """Returns `[B, R, K]` int64, the greedy draft behind each of the tokens `known`.

    Args:
        known: `[B, R]` int64, the tokens behind the rows' positions.
        hidden: `[B, R, H]`, fused features.
    """
    # Where products cast, they take the lm_head as it is: a float copy is gigabytes of an 8B.
    casts = torch.is_autocast_enabled(hidden.device.type)
    lm_head = target.lm_head if casts else target.lm_head.float()
    tokens = known
    unrolling, drafted = Unrolling(head.shape), []
    for _ in range(num_steps):
        embedded = F.embedding(tokens, target.embedding).float()
        hidden = head.advance(embedded, hidden, unrolling)
        tokens = head.target_ids(head.scores(hidden, lm_head).argmax(-1))
        drafted.append(tokens)
    return torch.stack(drafted, dim=-1)
