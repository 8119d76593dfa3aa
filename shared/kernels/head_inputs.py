"""The input of a draft head's row: a token's embedding beside a hidden state."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from shared.kernels.kernel_settings import runs_triton
from shared.kernels.norm import plain_rms_norm

Norm = tuple[Tensor, float]


def join_inputs(
    token_ids: Tensor,
    embedding: Tensor,
    hidden: Tensor,
    rows: Tensor | None,
    norms: tuple[Norm, Norm] | None,
    *,
    normed_residual: bool,
) -> tuple[Tensor, Tensor]:
    """Gathers, normalises and joins both halves: one pass on CUDA, plain torch elsewhere.

    Args:
        token_ids: `[T]` int64.
        embedding: `[V, H]`.
        hidden: `[R, H]`.
        rows: `[T]` int64, the row of `hidden` that each row reads; None takes them in order.
        norms: weight `[H]` and eps of the norms of embedding and hidden state; None has none.
        normed_residual: the second result is the normalised hidden state.

    Returns:
        The joined rows `[T, 2H]`, embedding first, and the hidden states `[T, H]`.
    """
    if runs_triton(hidden):
        from shared.kernels.fused_triton import fused_join_inputs

        return fused_join_inputs(
            token_ids, embedding, hidden, rows, norms, normed_residual=normed_residual
        )
    return plain_join_inputs(
        token_ids, embedding, hidden, rows, norms, normed_residual=normed_residual
    )


def plain_join_inputs(
    token_ids: Tensor,
    embedding: Tensor,
    hidden: Tensor,
    rows: Tensor | None,
    norms: tuple[Norm, Norm] | None,
    *,
    normed_residual: bool,
) -> tuple[Tensor, Tensor]:
    """`join_inputs` in plain torch, on any device: the kernel's oracle."""
    embedded = F.embedding(token_ids, embedding)
    residual = hidden if rows is None else hidden.index_select(0, rows)
    normed = residual
    if norms is not None:
        first, second = norms
        embedded = plain_rms_norm(embedded, *first)
        normed = plain_rms_norm(residual, *second)
    joined = torch.cat((embedded, normed), dim=-1)
    return joined, normed if normed_residual else residual
