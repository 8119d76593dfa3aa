"""A small Llama in plain torch whose parameter names are those of ``LlamaForCausalLM``."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F


@dataclass(frozen=True)
class Shape:
    """Sizes of a model; ``kv_heads`` divides ``heads``."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocabulary: int = 8192
    positions: int = 2048
    theta: float = 10000.0
    eps: float = 1e-5


TARGET = Shape(hidden=512, layers=6, heads=4, kv_heads=1, head_dim=128, intermediate=1280)
DRAFT = Shape(hidden=256, layers=3, heads=4, kv_heads=2, head_dim=64, intermediate=768)

Cache = list[tuple[Tensor, Tensor]]
"""Per layer: keys and values, each [batch, kv_heads, room, head_dim]."""


class RMSNorm(nn.Module):
    """Root-mean-square norm over the last axis, computed in float32."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return (self.weight * wide).to(x.dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of [batch, heads, n, head_dim]; cos, sin broadcast to [.., n, head_dim]."""
    first, second = x.chunk(2, dim=-1)
    return (x * cos + torch.cat((-second, first), dim=-1) * sin).to(x.dtype)


class Attention(nn.Module):
    """Grouped-query attention, with or without a preallocated cache."""

    def __init__(self, s: Shape) -> None:
        super().__init__()
        self.s = s
        self.q_proj = nn.Linear(s.hidden, s.heads * s.head_dim, bias=False)
        self.k_proj = nn.Linear(s.hidden, s.kv_heads * s.head_dim, bias=False)
        self.v_proj = nn.Linear(s.hidden, s.kv_heads * s.head_dim, bias=False)
        self.o_proj = nn.Linear(s.heads * s.head_dim, s.hidden, bias=False)

    def project(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        batch, n, _ = x.shape
        q = self.q_proj(x).view(batch, n, self.s.heads, self.s.head_dim).transpose(1, 2)
        k = self.k_proj(x).view(batch, n, self.s.kv_heads, self.s.head_dim).transpose(1, 2)
        v = self.v_proj(x).view(batch, n, self.s.kv_heads, self.s.head_dim).transpose(1, 2)
        return rotate(q, cos, sin), rotate(k, cos, sin), v

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q, k, v = self.project(x, cos, sin)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        mixed: Tensor = self.o_proj(out.transpose(1, 2).flatten(2))
        return mixed

    def cached(
        self, x: Tensor, cos: Tensor, sin: Tensor, kv: tuple[Tensor, Tensor], at: int, mask: Tensor
    ) -> Tensor:
        """Writes keys and values at ``at`` and attends to all before; mask [batch, 1, n, end]."""
        q, k, v = self.project(x, cos, sin)
        batch, _, n, dim = q.shape
        end = at + n
        kv[0][:, :, at:end], kv[1][:, :, at:end] = k, v
        if n == 1:  # the heads of a group become query rows, so that no key is copied
            few = q.view(batch, self.s.kv_heads, -1, dim)
            past = kv[0][:, :, :end], kv[1][:, :, :end]
            one = F.scaled_dot_product_attention(few, *past, attn_mask=mask.to(q.dtype))
            near: Tensor = self.o_proj(one.reshape(batch, 1, -1))
            return near
        keys, values = kv[0][:, :, None, :end], kv[1][:, :, None, :end]
        grouped = q.view(batch, self.s.kv_heads, -1, n, dim)
        scores = (grouped @ keys.transpose(-1, -2)).float() * dim**-0.5 + mask[:, :, None]
        out = (scores.softmax(-1).to(values.dtype) @ values).view(batch, self.s.heads, n, dim)
        mixed: Tensor = self.o_proj(out.transpose(1, 2).flatten(2))
        return mixed


class Mlp(nn.Module):
    """SwiGLU."""

    def __init__(self, s: Shape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(s.hidden, s.intermediate, bias=False)
        self.up_proj = nn.Linear(s.hidden, s.intermediate, bias=False)
        self.down_proj = nn.Linear(s.intermediate, s.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class Layer(nn.Module):
    """One pre-norm block."""

    def __init__(self, s: Shape) -> None:
        super().__init__()
        self.self_attn = Attention(s)
        self.mlp = Mlp(s)
        self.input_layernorm = RMSNorm(s.hidden, s.eps)
        self.post_attention_layernorm = RMSNorm(s.hidden, s.eps)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class Trunk(nn.Module):
    """Embedding, blocks and final norm (the ``model.`` part of the parameter names)."""

    def __init__(self, s: Shape) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(s.vocabulary, s.hidden)
        self.layers = nn.ModuleList(Layer(s) for _ in range(s.layers))
        self.norm = RMSNorm(s.hidden, s.eps)


class Llama(nn.Module):
    """Decoder with tied embeddings."""

    cos: Tensor
    sin: Tensor

    def __init__(self, s: Shape) -> None:
        super().__init__()
        self.s = s
        self.model = Trunk(s)
        cos, sin = self.tables()
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)
        self._initialise()

    def tables(self) -> tuple[Tensor, Tensor]:
        """Cosines and sines [positions, head_dim] in float32; bfloat16 would blur positions."""
        s = self.s
        steps = torch.arange(0, s.head_dim, 2).float() / s.head_dim
        angles = torch.outer(torch.arange(s.positions).float(), s.theta**-steps).repeat(1, 2)
        return angles.cos(), angles.sin()

    def _initialise(self) -> None:
        for name, weight in self.named_parameters():
            if weight.dim() == 2:
                out = name.endswith(("o_proj.weight", "down_proj.weight"))
                nn.init.normal_(weight, std=0.02 / (2 * self.s.layers) ** 0.5 if out else 0.02)

    def logits(self, x: Tensor) -> Tensor:
        """[.., hidden] to [.., vocabulary] through the tied embedding."""
        return F.linear(self.model.norm(x), self.model.embed_tokens.weight)

    def forward(self, ids: Tensor) -> Tensor:
        """Ids [batch, n] to logits [batch, n, vocabulary]."""
        n = ids.shape[1]
        x = self.model.embed_tokens(ids)
        for layer in self.model.layers:
            x = layer(x, self.cos[:n], self.sin[:n])
        return self.logits(x)

    def cache(self, batch: int, room: int, like: Tensor) -> Cache:
        """An empty cache for ``room`` tokens of each of ``batch`` rows."""
        shape = (batch, self.s.kv_heads, room, self.s.head_dim)
        return [(like.new_zeros(shape), like.new_zeros(shape)) for _ in range(self.s.layers)]

    def step(self, ids: Tensor, positions: Tensor, cache: Cache, at: int, mask: Tensor) -> Tensor:
        """Ids, positions [batch, n] and mask [batch, 1, n, at + n] to the last token's logits."""
        x = self.model.embed_tokens(ids)
        cos, sin = self.cos[positions][:, None], self.sin[positions][:, None]
        for layer, kv in zip(self.model.layers, cache, strict=True):
            assert isinstance(layer, Layer)
            x = x + layer.self_attn.cached(layer.input_layernorm(x), cos, sin, kv, at, mask)
            x = x + layer.mlp(layer.post_attention_layernorm(x))
        return self.logits(x[:, -1])


def parameter_count(model: nn.Module) -> int:
    """Number of parameters, the tied embedding once."""
    return sum(p.numel() for p in model.parameters())
