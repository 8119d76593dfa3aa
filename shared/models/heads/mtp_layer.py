"""A model's own next-token layer: an input of embedding and hidden state, one decoder layer, a
norm."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from shared.layers.attention import ForwardContext, SelfAttention
from shared.layers.decoder_layer import DecoderLayer
from shared.layers.linear import Linear
from shared.layers.norm import RmsNorm
from shared.models.mtp_keys import MtpStyle


@dataclass(frozen=True, slots=True)
class MtpLayer:
    """See `HeadLayer`. The state it hands on is normed, as the target's hidden state is.

    Most layers read `cat(embedding, hidden)`. MiMo's read `cat(hidden, embedding)`, and
    were trained with zeros for the embedding at position 0.

    Source: DeepSeek-V3, arXiv 2412.19437, section 2.2, equations 21 to 23; MiMo, arXiv 2505.07608,
    section 2.2.

    Attributes:
        projection: `2H` to `H`.
    """

    style: MtpStyle
    embedding_norm: RmsNorm
    hidden_norm: RmsNorm
    projection: Linear
    block: DecoderLayer
    state_norm: RmsNorm

    @property
    def attention(self) -> SelfAttention:
        return self.block.attention

    def __call__(self, embedded: Tensor, hidden: Tensor, context: ForwardContext) -> Tensor:
        if self.style is not MtpStyle.MIMO:
            inputs = (self.embedding_norm(embedded), self.hidden_norm(hidden))
        else:
            is_first = (context.batch.positions == 0).unsqueeze(1)
            embedded = embedded.masked_fill(is_first, 0.0)
            inputs = (self.hidden_norm(hidden), self.embedding_norm(embedded))
        return self.state_norm(self.block(self.projection(torch.cat(inputs, dim=-1)), context))
