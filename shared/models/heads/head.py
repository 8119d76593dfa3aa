"""A draft head: a layer that continues the target's hidden states token by token.

Row p reads the embedding of token p + 1 and the hidden state of position p, so its output scores
token p + 2. The hidden state is the target's where that is known, and the head's own recurrent
state on the nodes of a tree.

Heads of several next-token layers look further with each: row p of layer k reads the embedding of
token p + 1 + k and the state of row p of layer k - 1.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from shared.kv.batch import ForwardBatch
from shared.kv.layout import KvLayout
from shared.kv.pool import KvPool
from shared.layers.attention import ForwardContext, plan_for
from shared.layers.rotary import Rotary
from shared.model_options import AttentionBackend
from shared.models.heads.feature_spec import FeatureSpec
from shared.models.heads.fusion import FeatureFusion
from shared.models.heads.layers import HeadLayer
from shared.models.heads.vocabulary import DraftVocabulary


class HeadSizes(Protocol):
    """The sizes in the config of any kind of head."""

    @property
    def num_kv_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def max_position_embeddings(self) -> int: ...


@dataclass(frozen=True, slots=True)
class DraftHead:
    """Weights and forward pass of one head.

    Attributes:
        feature_spec: what the target sends.
        fusion: the remaining computation on a feature row; None when rows come `H` wide.
        embedding: `[V, H]`.
        layers: one, or the next-token layers of a model that has several.
        attention_backend: what computes attention.
    """

    config: HeadSizes
    feature_spec: FeatureSpec
    fusion: FeatureFusion | None
    embedding: Tensor
    layers: tuple[HeadLayer, ...]
    vocabulary: DraftVocabulary
    rotary: Rotary
    attention_backend: AttentionBackend = AttentionBackend.AUTO

    @property
    def device(self) -> torch.device:
        return self.embedding.device

    @property
    def dtype(self) -> torch.dtype:
        return self.embedding.dtype

    def kv_layout(self, page_size: int, dtype: torch.dtype | None = None) -> KvLayout:
        """Returns the layout of this head's cache, in `dtype` or the head's own."""
        return KvLayout(
            num_layers=len(self.layers),
            num_kv_heads=self.config.num_kv_heads,
            head_dim=self.config.head_dim,
            page_size=page_size,
            dtype=dtype or self.dtype,
            has_values=not self.layers[0].attention.shape.is_latent,
        )

    def reads_rows(self, rows: Tensor) -> bool:
        """Whether feature rows are hidden states as they are, so that `fuse` would return them."""
        is_alike = rows.dtype == self.dtype and rows.device == self.device
        return self.fusion is None and is_alike

    def fuse(self, rows: Tensor) -> Tensor:
        """Returns hidden states `[R, H]` of feature rows `[R, W]`, on this head's device."""
        rows = rows.to(device=self.device, dtype=self.dtype)
        return rows if self.fusion is None else self.fusion(rows)

    def forward(
        self, batch: ForwardBatch, hidden: Tensor, pool: KvPool, *, layer: int = 0
    ) -> Tensor:
        """Returns the recurrent states `[T, H]` of the rows of `batch`, and writes their keys and
        values to `pool`.

        Args:
            batch: `token_ids` are those that follow the rows' positions.
            hidden: `[T, H]`, the hidden state at each row's position.
            layer: the one that computes them.
        """
        embedded = F.embedding(batch.token_ids, self.embedding)
        cos, signed_sin = self.rotary.tables(batch.positions)
        shape = self.layers[layer].attention.shape
        plans = {shape.sliding_window: plan_for(batch, shape, self.attention_backend)}
        context = ForwardContext(batch, pool, cos, signed_sin, plans)
        return self.layers[layer](embedded, hidden, context)

    def logits(self, states: Tensor) -> Tensor:
        """Returns `[L, V]` float32 over the target's vocabulary for recurrent states `[L, H]`."""
        return self.vocabulary.logits(states)
