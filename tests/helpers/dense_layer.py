"""A plain pre-norm decoder layer: dense, one sequence, without a cache, head by head."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

EPS, THETA = 1e-6, 10000.0


@dataclass(frozen=True)
class DenseLayer:
    """The layer whose tensor names begin with `prefix`; biases and q/k norms are optional."""

    tensors: Mapping[str, Tensor]
    prefix: str
    head_dim: int

    def __call__(
        self,
        rows: Tensor,
        positions: Tensor,
        sees: Tensor,
        context: Tensor | None = None,
        context_positions: Tensor | None = None,
    ) -> Tensor:
        """Returns `[N, H]`.

        Args:
            sees: attention mask `[N, C + N]` bool, over the context and then the rows.
            context: `[C, H]`, hidden states that give the keys and values before the rows' own.
        """
        normed = self.norm("input_layernorm", rows)
        read = normed if context is None else torch.cat((context, normed))
        if context_positions is not None:
            key_positions = torch.cat((context_positions, positions))
        else:
            key_positions = positions
        rows = rows + self._attend(normed, positions, read, key_positions, sees)
        normed = self.norm("post_attention_layernorm", rows)
        gate, up = self.linear("mlp.gate_proj", normed), self.linear("mlp.up_proj", normed)
        return rows + self.linear("mlp.down_proj", gate * torch.sigmoid(gate) * up)

    def norm(self, name: str, rows: Tensor) -> Tensor:
        return plain_norm(rows, self.tensors[f"{self.prefix}{name}.weight"])

    def linear(self, name: str, rows: Tensor) -> Tensor:
        bias = self.tensors.get(f"{self.prefix}{name}.bias", torch.tensor(0.0))
        return rows @ self.tensors[f"{self.prefix}{name}.weight"].T + bias

    def _attend(
        self, rows: Tensor, positions: Tensor, read: Tensor, key_positions: Tensor, sees: Tensor
    ) -> Tensor:
        queries = self._heads("q", rows, positions)
        keys = self._heads("k", read, key_positions)
        values = self.linear("self_attn.v_proj", read).view(len(read), -1, self.head_dim)
        group = queries.shape[1] // keys.shape[1]
        outputs = []
        for head in range(queries.shape[1]):
            scores = queries[:, head] @ keys[:, head // group].T / math.sqrt(self.head_dim)
            weights = scores.masked_fill(~sees, -math.inf).softmax(1)
            outputs.append(weights @ values[:, head // group])
        return self.linear("self_attn.o_proj", torch.cat(outputs, dim=1))

    def _heads(self, kind: str, rows: Tensor, positions: Tensor) -> Tensor:
        heads = self.linear(f"self_attn.{kind}_proj", rows).view(len(rows), -1, self.head_dim)
        norm = f"{self.prefix}self_attn.{kind}_norm.weight"
        if norm in self.tensors:
            heads = plain_norm(heads, self.tensors[norm])
        return rotated(heads, positions)


def plain_norm(rows: Tensor, weight: Tensor) -> Tensor:
    return rows / (rows.pow(2).mean(-1, keepdim=True) + EPS).sqrt() * weight


def rotated(heads: Tensor, positions: Tensor) -> Tensor:
    """Rotates pairs (i, i + D/2) of `[N, heads, D]` by position / theta^(2i / D)."""
    half = heads.shape[-1] // 2
    rates = THETA ** (-torch.arange(half) / half)
    angles = (positions.unsqueeze(1) * rates).unsqueeze(1)
    first, second = heads[..., :half], heads[..., half:]
    return torch.cat(
        (
            first * angles.cos() - second * angles.sin(),
            second * angles.cos() + first * angles.sin(),
        ),
        dim=-1,
    )
