"""A DFlash head: layers that draft a whole block in one pass that is not causal.

What it knows of the text are the target's features alone: each layer turns them into keys and
values of the positions before the block. So a position's keys and values depend on nothing but its
own features, and are computed once.

Source: Chen et al., DFlash, arXiv 2602.06036, section 4.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from shared.kernels.rotary import rotate
from shared.kv.batch import ForwardBatch
from shared.kv.layout import KvLayout
from shared.kv.pool import KvPool
from shared.layers.attention import ForwardContext, plan_for
from shared.layers.decoder_layer import DecoderLayer
from shared.layers.linear import Linear
from shared.layers.norm import RmsNorm
from shared.layers.rotary import Rotary
from shared.model_options import AttentionBackend
from shared.models.heads.dflash_config import DflashConfig
from shared.models.heads.feature_spec import FeatureSpec


@dataclass(frozen=True, slots=True)
class DflashHead:
    """Weights and the two passes of one head.

    Attributes:
        feature_spec: what the target sends; it applies `fc`.
        feature_norm: of a feature row, before it becomes keys and values.
        context: `H` to keys and values of every layer, `[layer][key, value][head][dim]`.
        key_norms: one a layer, weight `[num_kv_heads, head_dim]`.
        embedding: `[V, H]`, the target's.
        lm_head: `H` to `V`, the target's.
        attention_backend: what computes attention.
    """

    config: DflashConfig
    feature_spec: FeatureSpec
    feature_norm: RmsNorm
    context: Linear
    key_norms: tuple[RmsNorm, ...]
    embedding: Tensor
    layers: tuple[DecoderLayer, ...]
    norm: RmsNorm
    lm_head: Linear
    rotary: Rotary
    attention_backend: AttentionBackend = AttentionBackend.AUTO

    @property
    def device(self) -> torch.device:
        return self.embedding.device

    @property
    def dtype(self) -> torch.dtype:
        return self.embedding.dtype

    @property
    def vocab_size(self) -> int:
        return self.embedding.shape[0]

    def kv_layout(self, page_size: int, dtype: torch.dtype | None = None) -> KvLayout:
        """Returns the layout of this head's cache, in `dtype` or the head's own."""
        sizes = self.config.layers
        return KvLayout(
            num_layers=sizes.num_layers,
            num_kv_heads=sizes.num_kv_heads,
            head_dim=sizes.head_dim,
            page_size=page_size,
            dtype=dtype or self.dtype,
        )

    def write_context(self, rows: Tensor, positions: Tensor, slots: Tensor, pool: KvPool) -> None:
        """Writes keys and values of R positions to `pool`, in every layer.

        Args:
            rows: `[R, W]`, their features.
            positions: `[R]` int64.
            slots: `[R]` int64.
        """
        sizes = self.config.layers
        states = self.feature_norm(rows.to(device=self.device, dtype=self.dtype))
        shape = (len(rows), len(self.layers), 2, sizes.num_kv_heads, sizes.head_dim)
        keys, values = self.context(states).view(shape).unbind(2)
        cos, signed_sin = self.rotary.tables(positions)
        for layer, norm in enumerate(self.key_norms):
            rotated = rotate(norm(keys[:, layer]), cos, signed_sin)
            pool.write(layer, slots, rotated, values[:, layer])

    def forward(self, batch: ForwardBatch, pool: KvPool) -> Tensor:
        """Returns the states `[T, H]` of the rows of blocks; the batch says which rows see each
        other.
        Their keys and values are written to `pool`, and are of no use later."""
        cos, signed_sin = self.rotary.tables(batch.positions)
        shape = self.layers[0].attention.shape
        plans = {shape.sliding_window: plan_for(batch, shape, self.attention_backend)}
        context = ForwardContext(batch, pool, cos, signed_sin, plans)
        states = F.embedding(batch.token_ids, self.embedding)
        for layer in self.layers:
            states = layer(states, context)
        return self.norm(states)

    def logits(self, states: Tensor) -> Tensor:
        """Returns `[L, V]` float32 for `states` `[L, H]`."""
        return self.lm_head(states).float()
