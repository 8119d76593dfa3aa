"""The one layer of each kind of head: from a token and a hidden state to the next state."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from shared.layers.attention import Attention, ForwardContext
from shared.layers.linear import Linear
from shared.layers.mlp import Mlp
from shared.layers.norm import RmsNorm


class HeadLayer(Protocol):
    """A layer that reads the embedding of token t + 1 and the hidden state of position t."""

    @property
    def attention(self) -> Attention: ...

    def __call__(self, embedded: Tensor, hidden: Tensor, context: ForwardContext) -> Tensor:
        """`[T, H]` each to the recurrent state `[T, H]`."""


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
        mixed = self.fc(torch.cat((embedded, hidden), dim=-1))
        mixed = mixed + self.attention(mixed, context)
        return mixed + self.mlp(self.mlp_norm(mixed))


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
        mixed = residual + self.attention(inputs, context)
        state = mixed + self.mlp(self.mlp_norm(mixed))
        return state if self.state_norm is None else self.state_norm(state)
