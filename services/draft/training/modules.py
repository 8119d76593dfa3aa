"""Torch modules of heads, whose parameters have the names of checkpoint files, and the attention of
training, which computes many drafts at once. Its scores are dense, so memory grows with the square
of the window."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from services.draft.training.head_shape import HeadShape

INITIAL_STD = 0.02
OUTPUT_STD = 0.005
"""For products that add to the residual stream, so that a head begins near the identity."""


class RmsNorm(nn.Module):
    """Root-mean-square norm over the last axis, computed in float32."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, rows: Tensor) -> Tensor:
        wide = rows.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return (self.weight * wide).to(rows.dtype)


def linear(inputs: int, outputs: int, *, bias: bool = False, std: float = INITIAL_STD) -> nn.Linear:
    """Returns a linear layer with normal weights and zero biases."""
    layer = nn.Linear(inputs, outputs, bias=bias)
    nn.init.normal_(layer.weight, std=std)
    if bias:
        nn.init.zeros_(layer.bias)
    return layer


class Mlp(nn.Module):
    """SwiGLU feed-forward."""

    def __init__(self, shape: HeadShape) -> None:
        super().__init__()
        self.gate_proj = linear(shape.hidden_size, shape.intermediate_size)
        self.up_proj = linear(shape.hidden_size, shape.intermediate_size)
        self.down_proj = linear(shape.intermediate_size, shape.hidden_size, std=OUTPUT_STD)

    def forward(self, rows: Tensor) -> Tensor:
        out: Tensor = self.down_proj(F.silu(self.gate_proj(rows)) * self.up_proj(rows))
        return out


class Projections(nn.Module):
    """The projections of an attention to queries, keys, values and output; the caller computes the
    attention itself.

    Args:
        width: of the input rows.
        has_bias: queries, keys and values have biases.
        has_norms: queries and keys have RMS norms, as in Qwen3.
    """

    def __init__(
        self, shape: HeadShape, width: int, *, has_bias: bool = False, has_norms: bool = False
    ) -> None:
        super().__init__()
        self.head_dim = shape.head_dim
        queries, keys = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
        self.q_proj = linear(width, queries, bias=has_bias)
        self.k_proj = linear(width, keys, bias=has_bias)
        self.v_proj = linear(width, keys, bias=has_bias)
        self.o_proj = linear(queries, shape.hidden_size, std=OUTPUT_STD)
        norm = RmsNorm if has_norms else nn.Identity
        self.q_norm = norm(shape.head_dim, shape.rms_norm_eps)
        self.k_norm = norm(shape.head_dim, shape.rms_norm_eps)

    def queries(self, rows: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
        """`[B, R, W]` to `[B, heads, R, D]`, rotated."""
        return rotate(self.q_norm(self._split(self.q_proj(rows))), rotation)

    def keys_values(self, rows: Tensor, rotation: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """`[B, R, W]` to keys, rotated, and values, each `[B, kv heads, R, D]`."""
        keys = rotate(self.k_norm(self._split(self.k_proj(rows))), rotation)
        return keys, self._split(self.v_proj(rows))

    def output(self, mixed: Tensor) -> Tensor:
        """`[B, heads, R, D]` to `[B, R, H]`."""
        out: Tensor = self.o_proj(mixed.transpose(1, 2).flatten(2))
        return out

    def _split(self, rows: Tensor) -> Tensor:
        return torch.unflatten(rows, -1, (-1, self.head_dim)).transpose(1, 2)


def rotation_at(positions: Tensor, *, head_dim: int, theta: float) -> tuple[Tensor, Tensor]:
    """Returns cosines and sines `[..., R, D]`, float32, of integer `positions` `[..., R]`."""
    half = torch.arange(0, head_dim, 2, device=positions.device).float() / head_dim
    angles = positions.float().unsqueeze(-1) * theta**-half
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos(), angles.sin()


def rotate(heads: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
    """Rotates pairs (i, i + D / 2) of `[B, heads, R, D]`."""
    cos, sin = rotation
    first, second = heads.chunk(2, dim=-1)
    return (heads * cos + torch.cat((-second, first), dim=-1) * sin).to(heads.dtype)


def init_as_identity(fc: nn.Linear, width: int) -> None:
    """Adds the identity to the columns of `fc` that read the last `width` inputs."""
    with torch.no_grad():
        fc.weight[:, -width:] += torch.eye(len(fc.weight), width)


KeysValues = tuple[Tensor, Tensor]
"""Each `[B, kv heads, R, D]`."""


def unrolled(queries: Tensor, steps: list[KeysValues]) -> Tensor:
    """Attention in the training-time test.

    Row i of step k is the k-th token drafted after row i of step 0. It attends to rows 0 … i of
    step 0, which hold the target's features, and of later steps to row i only: the drafted path
    that leads to it.

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
    products = [
        (grouped * keys.unsqueeze(2)).sum(-1, keepdim=True, dtype=torch.float32)
        for keys, _ in later
    ]
    path = torch.cat(products, dim=-1) / math.sqrt(queries.shape[-1])
    weights = torch.cat((context.masked_fill(unseen, -math.inf), path), dim=-1).softmax(-1)
    mixed = weights[..., :num_rows].to(queries.dtype) @ first_values.unsqueeze(2)
    for index, (_, values) in enumerate(later):
        column = num_rows + index
        mixed = mixed + weights[..., column : column + 1].to(values.dtype) * values.unsqueeze(2)
    return mixed.flatten(1, 2).to(queries.dtype)


def fused_unrolled(num_steps: int) -> Callable[[Tensor, list[KeysValues]], Tensor]:
    """Returns `unrolled` compiled for up to `num_steps` steps, each on its first use.

    Each number of steps is compiled separately; beyond its limit of programs torch would run the
    later steps uncompiled.
    """
    from torch._dynamo import config  # late, because the import takes a second

    config.recompile_limit = max(config.recompile_limit, num_steps)
    return torch.compile(unrolled)


def block(
    queries: Tensor, context: KeysValues, own: KeysValues, anchors: Tensor, block_size: int
) -> Tensor:
    """Attention of drafted blocks: to the context before a block's anchor, and within the block.

    Args:
        queries: `[B, heads, A * block_size, D]`.
        context: of the N rows of the window.
        own: of the blocks' rows.
        anchors: `[B, A]` int64, the first position of each block.

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
    """Returns queries `[B, heads, R, D]` as `[B, kv heads, heads of a group, R, D]`."""
    return torch.unflatten(queries, 1, (num_kv_heads, -1))


def scores(grouped: Tensor, keys: Tensor) -> Tensor:
    """Returns scaled products `[B, kv heads, group, R, N]` in float32."""
    products = grouped @ keys.unsqueeze(2).transpose(-1, -2)
    return products.float() / math.sqrt(grouped.shape[-1])
