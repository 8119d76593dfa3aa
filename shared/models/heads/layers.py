"""The one layer of each kind of head: from a token and a hidden state to the next state."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from shared.kernels.head_inputs import join_inputs
from shared.kernels.partials import Partials, total_of
from shared.layers.attention import Attention, ForwardContext, SelfAttention
from shared.layers.linear import Linear
from shared.layers.mlp import Mlp
from shared.layers.norm import RmsNorm


@dataclass(frozen=True, slots=True)
class HeadRows:
    """Rows of a head before their inputs are gathered.

    Attributes:
        token_ids: `[T]` int64.
        embedding: `[V, H]`.
        hidden: `[R, H]`.
        sources: `[T]` int64, the row of `hidden` that each row reads; None takes them in order.
    """

    token_ids: Tensor
    embedding: Tensor
    hidden: Tensor
    sources: Tensor | None = None


class HeadLayer(Protocol):
    """A layer that reads the embedding of token t + 1 and the hidden state of position t."""

    @property
    def attention(self) -> SelfAttention: ...

    def __call__(self, embedded: Tensor, hidden: Tensor, context: ForwardContext) -> Tensor:
        """`[T, H]` each to the recurrent state `[T, H]`."""


@runtime_checkable
class SplitHeadLayer(HeadLayer, Protocol):
    """A layer whose inputs can be gathered, and whose last sum can be made, by fused kernels."""

    @property
    def state_norm(self) -> RmsNorm | None:
        """Applied to the output; None in most heads."""

    def advance(self, rows: HeadRows, context: ForwardContext) -> tuple[Tensor, Tensor | Partials]:
        """Returns two tensors `[T, H]` whose sum is the state, before `state_norm`; the second may
        be left in parts."""


@dataclass(frozen=True, slots=True)
class EagleLayer:
    """EAGLE-2's: no norm before the attention, none at the end.

    Source: Li et al., arXiv 2401.15077, section 4.1 and figure 6.

    Attributes:
        fc: `2H` to `H`, embedding first.
    """

    fc: Linear
    attention: Attention
    mlp_norm: RmsNorm
    mlp: Mlp

    def __call__(self, embedded: Tensor, hidden: Tensor, context: ForwardContext) -> Tensor:
        mixed, update = self._advance(torch.cat((embedded, hidden), dim=-1), context)
        return mixed + total_of(update)

    def advance(self, rows: HeadRows, context: ForwardContext) -> tuple[Tensor, Tensor | Partials]:
        inputs, _ = join_inputs(
            rows.token_ids, rows.embedding, rows.hidden, rows.sources, None, normed_residual=False
        )
        return self._advance(inputs, context)

    @property
    def state_norm(self) -> RmsNorm | None:
        """None: the output is the state."""
        return None

    def _advance(self, inputs: Tensor, context: ForwardContext) -> tuple[Tensor, Tensor | Partials]:
        mixed = self.fc(inputs)
        mixed, normed = self.mlp_norm.add(mixed, self.attention.partials(mixed, context))
        return mixed, self.mlp.partials(normed)


@dataclass(frozen=True, slots=True)
class Eagle3Layer:
    """EAGLE-3's: embedding and hidden state stay apart until the attention, whose input is 2H.

    Source: Li et al., arXiv 2503.01840, section 3.1 and figure 5; the norm of the recurrent state
    is EAGLE-3.1's, arXiv 2605.09992.

    Attributes:
        state_norm: applied to the output; None in plain EAGLE-3.
        norm_before_residual: the residual is the normalised hidden state.
    """

    embedding_norm: RmsNorm
    hidden_norm: RmsNorm
    attention: Attention
    mlp_norm: RmsNorm
    mlp: Mlp
    state_norm: RmsNorm | None
    norm_before_residual: bool

    def __call__(self, embedded: Tensor, hidden: Tensor, context: ForwardContext) -> Tensor:
        normed = self.hidden_norm(hidden)
        residual = normed if self.norm_before_residual else hidden
        inputs = torch.cat((self.embedding_norm(embedded), normed), dim=-1)
        mixed, update = self._advance(inputs, residual, context)
        state = mixed + total_of(update)
        return state if self.state_norm is None else self.state_norm(state)

    def advance(self, rows: HeadRows, context: ForwardContext) -> tuple[Tensor, Tensor | Partials]:
        inputs, residual = join_inputs(
            rows.token_ids,
            rows.embedding,
            rows.hidden,
            rows.sources,
            (
                (self.embedding_norm.weight, self.embedding_norm.eps),
                (self.hidden_norm.weight, self.hidden_norm.eps),
            ),
            normed_residual=self.norm_before_residual,
        )
        return self._advance(inputs, residual, context)

    def _advance(
        self, inputs: Tensor, residual: Tensor, context: ForwardContext
    ) -> tuple[Tensor, Tensor | Partials]:
        mixed, normed = self.mlp_norm.add(residual, self.attention.partials(inputs, context))
        return mixed, self.mlp.partials(normed)
