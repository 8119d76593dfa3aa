"""One pre-norm transformer layer."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor

from shared.kernels.partials import Partials
from shared.layers.attention import Attention, ForwardContext
from shared.layers.mlp import Mlp
from shared.layers.norm import RmsNorm
from shared.layers.tensor_group import Part


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    """Attention and feed-forward block, each behind a norm and around a residual sum."""

    attention_norm: RmsNorm
    attention: Attention
    mlp_norm: RmsNorm
    mlp: Mlp

    def steadied(self) -> DecoderLayer:
        """Returns the same layer with products that keep a row's bits; see `Linear.steadied`."""
        attention = replace(
            self.attention,
            qkv=self.attention.qkv.steadied(),
            output=self.attention.output.steadied(),
        )
        mlp = replace(self.mlp, gate_up=self.mlp.gate_up.steadied(), down=self.mlp.down.steadied())
        return replace(self, attention=attention, mlp=mlp)

    def __call__(self, hidden: Tensor, context: ForwardContext) -> Tensor:
        """`[T, H]` to `[T, H]`, the residual stream; the input is left as it was."""
        hidden, normed = self.attention_norm.add(hidden, None)
        hidden, normed = self.mlp_norm.add(hidden, self.attention(normed, context))
        return hidden + self.mlp(normed)

    def advance(
        self,
        hidden: Tensor | Part,
        update: Tensor | Partials | Part | None,
        context: ForwardContext,
    ) -> tuple[Tensor, Tensor, Tensor | Partials | Part]:
        """Computes the layer on the residual stream `hidden + update`, either of which may be a
        part of a sum over a group, and the latter a sum that is left in parts.

        Returns:
            The stream that enters, the stream between the two blocks, and what the second one adds
            to it. Sums are left to the next norm, which reads the stream anyway.
        """
        entered, normed = self.attention_norm.add_parts(hidden, update)
        between, normed = self.mlp_norm.add_parts(entered, self.attention.part(normed, context))
        return entered, between, self.mlp.part(normed)
