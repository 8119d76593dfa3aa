"""DFlash: a head that drafts a whole block in one non-causal forward.

Source: Chen et al., DFlash, arXiv 2602.06036.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from services.draft.training.head_shape import HeadShape
from services.draft.training.modules import Mlp, Projections, RmsNorm, block, linear, rotation_at


class BlockHead(nn.Module):
    """Layers over the rows of a block, into which the target's features are injected as keys and
    values of the positions before it.

    Attributes:
        prefix: in front of the names of the parameters in the checkpoint.
    """

    prefix = ""

    def __init__(self, shape: HeadShape) -> None:
        super().__init__()
        self.shape = shape
        self.fc = linear(shape.feature_width, shape.hidden_size)
        self.hidden_norm = RmsNorm(shape.hidden_size, shape.rms_norm_eps)
        self.layers = nn.ModuleList(BlockLayer(shape) for _ in range(shape.num_layers))
        self.norm = RmsNorm(shape.hidden_size, shape.rms_norm_eps)

    def forward(
        self, embedding: Tensor, token_ids: Tensor, features: Tensor, anchors: Tensor
    ) -> Tensor:
        """Returns the states `[B, A, block_size - 1, H]` that score the drafted positions.

        Args:
            embedding: `[V, H]`, the target's.
            token_ids: `[B, N]` int64.
            features: `[B, N, W]`.
            anchors: `[B, A]` int64, positions of the known token that opens each block.
        """
        size = self.shape.block_size
        context = self.hidden_norm(self.fc(features))
        blocks = self._masked_blocks(token_ids.gather(1, anchors))
        rows = F.embedding(blocks, embedding).to(context.dtype).flatten(1, 2)
        inner = torch.arange(size, device=anchors.device)
        positions = (anchors.unsqueeze(-1) + inner).flatten(1)
        past = torch.arange(token_ids.shape[1], device=anchors.device)
        rotations = self._rotation(past), self._rotation(positions.unsqueeze(1))
        for layer in self.layers:
            rows = layer(rows, context, rotations, anchors)
        states: Tensor = torch.unflatten(self.norm(rows), 1, (-1, size))
        return states[:, :, 1:]

    def _masked_blocks(self, known: Tensor) -> Tensor:
        """`[B, A]` known tokens to `[B, A, block_size]` with masks behind them."""
        size = (*known.shape, self.shape.block_size - 1)
        masks = known.new_full(size, self.shape.mask_token_id)
        return torch.cat((known.unsqueeze(-1), masks), dim=-1)

    def _rotation(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        shape = self.shape
        return rotation_at(positions, head_dim=shape.head_dim, theta=shape.rope_theta)


class BlockLayer(nn.Module):
    """A Qwen3 block with the context's keys and values beside its own."""

    def __init__(self, shape: HeadShape) -> None:
        super().__init__()
        hidden, eps = shape.hidden_size, shape.rms_norm_eps
        self.block_size = shape.block_size
        self.input_layernorm = RmsNorm(hidden, eps)
        self.self_attn = Projections(shape, hidden, has_norms=True)
        self.post_attention_layernorm = RmsNorm(hidden, eps)
        self.mlp = Mlp(shape)

    def forward(
        self,
        rows: Tensor,
        context: Tensor,
        rotations: tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]],
        anchors: Tensor,
    ) -> Tensor:
        attention, (past, own) = self.self_attn, rotations
        normed = self.input_layernorm(rows)
        mixed = block(
            attention.queries(normed, own),
            attention.keys_values(context, past),
            attention.keys_values(normed, own),
            anchors,
            self.block_size,
        )
        rows = rows + attention.output(mixed)
        out: Tensor = rows + self.mlp(self.post_attention_layernorm(rows))
        return out
