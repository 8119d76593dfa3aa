"""Attention masks in training, where many drafts are computed at once.

All scores are dense, so memory grows with the square of the window.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

KeysValues = tuple[Tensor, Tensor]
"""Each `[B, kv heads, R, D]`."""


def unrolled(queries: Tensor, steps: list[KeysValues]) -> Tensor:
    """Attention in the training-time test.

    Row i of step k stands for the k-th token drafted behind row i of step 0. It sees rows 0 … i of
    step 0, which hold the target's features, and of the later steps row i alone: the path that
    leads to it.

    Source: Li et al., arXiv 2503.01840, section 3.2 and figure 6.

    Args:
        queries: `[B, heads, R, D]` of the last step.
        steps: keys and values of all steps up to this one.

    Returns:
        `[B, heads, R, D]`.
    """
    (first_keys, first_values), *later = steps
    if not later:
        return F.scaled_dot_product_attention(
            queries, first_keys, first_values, is_causal=True, enable_gqa=True
        )
    grouped = group(queries, first_keys.shape[1])
    context = scores(grouped, first_keys)
    num_rows = context.shape[-1]
    unseen = torch.ones(num_rows, num_rows, dtype=torch.bool, device=context.device).triu(1)
    own = [(grouped * keys.unsqueeze(2)).sum(-1, keepdim=True, dtype=torch.float32) for keys, _ in
           later]  # fmt: skip
    path = torch.cat(own, dim=-1) / math.sqrt(queries.shape[-1])
    weights = torch.cat((context.masked_fill(unseen, -math.inf), path), dim=-1).softmax(-1)
    mixed = weights[..., :num_rows].to(queries.dtype) @ first_values.unsqueeze(2)
    for index, (_, values) in enumerate(later):
        column = num_rows + index
        mixed = mixed + weights[..., column : column + 1].to(values.dtype) * values.unsqueeze(2)
    return mixed.flatten(1, 2).to(queries.dtype)


def fused_unrolled(num_steps: int) -> Callable[[Tensor, list[KeysValues]], Tensor]:
    """Returns `unrolled` compiled for up to `num_steps` steps, each on its first use.

    Every number of steps is a program of its own; past its limit of them torch would run the later
    ones uncompiled.
    """
    from torch._dynamo import config  # takes a second, which only compiling is worth

    config.recompile_limit = max(config.recompile_limit, num_steps)
    return torch.compile(unrolled)


def block(
    queries: Tensor, context: KeysValues, own: KeysValues, anchors: Tensor, block_size: int
) -> Tensor:
    """Attention of drafted blocks: to the context before the block's anchor and within the block.

    Args:
        queries: `[B, heads, A * block_size, D]`.
        context: of the N rows of the window.
        own: of the blocks' rows.
        anchors: `[B, A]` int64, the position at which each block begins.

    Returns:
        `[B, heads, A * block_size, D]`.
    """
    num_context = context[0].shape[2]
    grouped = group(queries, context[0].shape[1])
    before = scores(grouped, context[0])
    columns = torch.arange(num_context, device=queries.device)
    unseen = columns >= anchors.repeat_interleave(block_size, dim=1).unsqueeze(-1)
    before = before.masked_fill(unseen[:, None, None], -math.inf)
    own_keys, own_values = (torch.unflatten(part, 2, (-1, block_size)).unsqueeze(2) for part in own)
    by_block = torch.unflatten(grouped, 3, (-1, block_size))
    within = (by_block @ own_keys.transpose(-1, -2)).float() / math.sqrt(queries.shape[-1])
    weights = torch.cat((before, within.flatten(3, 4)), dim=-1).softmax(-1).to(queries.dtype)
    mixed = weights[..., :num_context] @ context[1].unsqueeze(2)
    inner = torch.unflatten(weights[..., num_context:], 3, (-1, block_size)) @ own_values
    return (mixed + inner.flatten(3, 4)).flatten(1, 2).to(queries.dtype)


def group(queries: Tensor, num_kv_heads: int) -> Tensor:
    """`[B, heads, R, D]` to `[B, kv heads, heads of a group, R, D]`."""
    return torch.unflatten(queries, 1, (num_kv_heads, -1))


def scores(grouped: Tensor, keys: Tensor) -> Tensor:
    """Returns scaled products `[B, kv heads, group, R, N]` in float32."""
    products = grouped @ keys.unsqueeze(2).transpose(-1, -2)
    return products.float() / math.sqrt(grouped.shape[-1])
