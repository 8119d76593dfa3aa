"""Rows of an embedding, all or those a process holds: one pass on CUDA, plain torch elsewhere."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from shared.kernels.kernel_settings import runs_triton


def own_embeddings(token_ids: Tensor, embedding: Tensor, first_token: int) -> Tensor:
    """Returns `[T, H]`: rows of `embedding` `[V, H]`, which are those of the tokens from
    `first_token` on, and zeros for tokens that others hold.

    Args:
        token_ids: `[T]` int64.
    """
    if runs_triton(embedding):
        from shared.kernels.fused_triton import fused_own_embeddings

        return fused_own_embeddings(token_ids, embedding, first_token)
    return plain_own_embeddings(token_ids, embedding, first_token)


def embeddings(token_ids: Tensor, embedding: Tensor) -> Tensor:
    """Returns rows of `embedding` `[V, H]` for `token_ids` `[T]` int64, all below V."""
    is_fused = runs_triton(embedding) and embedding.is_contiguous() and token_ids.is_contiguous()
    if is_fused and not torch.compiler.is_compiling():
        return own_embeddings(token_ids, embedding, 0)
    return F.embedding(token_ids, embedding)


def plain_own_embeddings(token_ids: Tensor, embedding: Tensor, first_token: int) -> Tensor:
    """`own_embeddings` in plain torch, on any device: the kernel's oracle."""
    own_ids = token_ids - first_token
    is_own = (own_ids >= 0) & (own_ids < len(embedding))
    rows = F.embedding(own_ids.masked_fill(~is_own, 0), embedding)
    return rows.masked_fill(~is_own.unsqueeze(1), 0.0)
