"""One pre-norm transformer layer."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from shared.layers.attention import Attention, ForwardContext
from shared.layers.mlp import Mlp
from shared.layers.norm import RmsNorm


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    """Attention and feed-forward block, each behind a norm and around a residual sum."""

    attention_norm: RmsNorm
    attention: Attention
    mlp_norm: RmsNorm
    mlp: Mlp

    def __call__(self, hidden: Tensor, context: ForwardContext) -> Tensor:
        """`[T, H]` to `[T, H]`, the residual stream; the input is left as it was."""
        hidden = hidden + self.attention(self.attention_norm(hidden), context)
        return hidden + self.mlp(self.mlp_norm(hidden))
