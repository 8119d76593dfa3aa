"""One transformer layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from shared.kernels.pointwise import Activation, Partials, bounded_gate_mul, gate_mul, total_of
from shared.layers.attention import ForwardContext, SelfAttention
from shared.layers.linear import Linear
from shared.layers.norm import RmsNorm
from shared.layers.tensor_group import Part


class FeedForward(Protocol):
    """The second block of a decoder layer: an MLP or experts."""

    def __call__(self, hidden: Tensor) -> Tensor:
        """`[T, H]` to `[T, H]`."""

    def part(self, hidden: Tensor) -> Tensor | Partials | Part:
        """Returns the result, or parts that sum to it; see `Linear.part`."""

    def routes(self, hidden: Tensor) -> Tensor | None:
        """Returns the experts `[T, k]` of the rows; None in an MLP."""


@dataclass(frozen=True, slots=True)
class Mlp:
    """`down(activation(gate(x)) * up(x))` with gate and up as one product.

    Attributes:
        gate_up: `H` to `2N`, gate first.
        down: `N` to `H`.
        limit: see `bounded_gate_mul`; None in most families.
    """

    gate_up: Linear
    down: Linear
    activation: Activation = Activation.SILU
    limit: float | None = None

    def __call__(self, hidden: Tensor) -> Tensor:
        return self.down(self._gated(hidden))

    def partials(self, hidden: Tensor) -> Tensor | Partials:
        """Returns the result, or its parts; see `Linear.partials`."""
        return self.down.partials(self._gated(hidden))

    def part(self, hidden: Tensor) -> Tensor | Partials | Part:
        return self.down.part(self._gated(hidden))

    def routes(self, hidden: Tensor) -> Tensor | None:
        """See `FeedForward`."""

    def _gated(self, hidden: Tensor) -> Tensor:
        if self.limit is not None:
            return bounded_gate_mul(self.gate_up(hidden), self.limit)
        if self.activation is Activation.SILU:
            return self.gate_up.gated(hidden)
        return gate_mul(self.gate_up(hidden), self.activation)


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    """Attention and feed-forward block, each around a residual sum.

    Attributes:
        attention_norm: norm of the attention's input; None where only its output is normed.
        mlp_norm: likewise of the feed-forward block.
        attention_output_norm: norm of the attention's output; None in most families.
        mlp_output_norm: likewise of the feed-forward block.
    """

    attention_norm: RmsNorm | None
    attention: SelfAttention
    mlp_norm: RmsNorm | None
    mlp: FeedForward
    attention_output_norm: RmsNorm | None = None
    mlp_output_norm: RmsNorm | None = None

    def __call__(self, hidden: Tensor, context: ForwardContext) -> Tensor:
        """`[T, H]` to `[T, H]`, the residual stream; the input is not changed."""
        hidden, inputs = _enter(self.attention_norm, hidden, None)
        attended = _normed(self.attention_output_norm, self.attention(inputs, context))
        hidden, inputs = _enter(self.mlp_norm, hidden, attended)
        return hidden + _normed(self.mlp_output_norm, self.mlp(inputs))

    def advance(
        self,
        hidden: Tensor | Part,
        update: Tensor | Partials | Part | None,
        context: ForwardContext,
    ) -> tuple[Tensor, Tensor, Tensor | Partials | Part]:
        """Computes the layer on the residual stream `hidden + update`. Either may be this process's
        part of a sum over a group, and `update` may be unsummed `Partials`.

        Returns:
            The stream that enters the layer, the stream between its two blocks, and the output of
            the second block. The next norm adds the last two, since it reads the stream anyway.
        """
        entered, inputs = _enter(self.attention_norm, hidden, update)
        if self.attention_output_norm is None:
            update = self.attention.part(inputs, context)
        else:
            update = self.attention_output_norm(self.attention(inputs, context))
        between, inputs = _enter(self.mlp_norm, entered, update)
        if context.routes is not None:
            context.routes.append(self.mlp.routes(inputs))
        if self.mlp_output_norm is None:
            return entered, between, self.mlp.part(inputs)
        return entered, between, self.mlp_output_norm(self.mlp(inputs))


def _normed(norm: RmsNorm | None, values: Tensor) -> Tensor:
    return values if norm is None else norm(values)


def _enter(
    norm: RmsNorm | None, hidden: Tensor | Part, update: Tensor | Partials | Part | None
) -> tuple[Tensor, Tensor]:
    """Returns the stream `hidden + update`, and the next block's input: the stream after `norm`."""
    if norm is not None:
        return norm.add(hidden, update)
    stream = stream_of(hidden, update)
    return stream, stream


def stream_of(hidden: Tensor | Part, update: Tensor | Partials | Part | None) -> Tensor:
    """Returns the stream `hidden + update`, see `DecoderLayer.advance`."""
    if isinstance(hidden, Part):
        assert update is None
        hidden = hidden.group.sum(total_of(hidden.values))
    if isinstance(update, Part):
        update = update.group.sum(total_of(update.values))
    return hidden if update is None else hidden + total_of(update)
