"""Torch modules of a head; parameter names are those of checkpoint files."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from services.draft.training.head_shape import HeadShape

INITIAL_STD = 0.02
OUTPUT_STD = 0.005
"""Of the products that add to the residual stream, so that a head begins near the identity."""


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
    """Returns a normally initialised product, biases zero."""
    layer = nn.Linear(inputs, outputs, bias=bias)
    nn.init.normal_(layer.weight, std=std)
    if bias:
        nn.init.zeros_(layer.bias)
    return layer


class Mlp(nn.Module):
    """SwiGLU."""

    def __init__(self, shape: HeadShape) -> None:
        super().__init__()
        self.gate_proj = linear(shape.hidden_size, shape.intermediate_size)
        self.up_proj = linear(shape.hidden_size, shape.intermediate_size)
        self.down_proj = linear(shape.intermediate_size, shape.hidden_size, std=OUTPUT_STD)

    def forward(self, rows: Tensor) -> Tensor:
        out: Tensor = self.down_proj(F.silu(self.gate_proj(rows)) * self.up_proj(rows))
        return out


class Projections(nn.Module):
    """Queries, keys, values and output of an attention; the caller gives the attention mask.

    Args:
        width: of the rows that are read.
        has_bias: of queries, keys and values.
        has_norms: RMS norms of queries and keys, as Qwen3's.
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
    """Returns cosines and sines `[..., R, D]` in float32 of integer `positions` `[..., R]`."""
    half = torch.arange(0, head_dim, 2, device=positions.device).float() / head_dim
    angles = positions.float().unsqueeze(-1) * theta**-half
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos(), angles.sin()


def rotate(heads: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
    """Rotates pairs (i, i + D / 2) of `[B, heads, R, D]`."""
    cos, sin = rotation
    first, second = heads.chunk(2, dim=-1)
    return (heads * cos + torch.cat((-second, first), dim=-1) * sin).to(heads.dtype)


def begin_as_identity(fc: nn.Linear, width: int) -> None:
    """Adds the identity to the columns of `fc` that read the last `width` inputs."""
    with torch.no_grad():
        fc.weight[:, -width:] += torch.eye(len(fc.weight), width)
