"""A draft head: a layer that continues the target's hidden states token by token.

Row p reads the embedding of token p + 1 and the hidden state of position p, so its output scores
token p + 2. The hidden state is the target's where that is known, and the head's own recurrent
state on the nodes of a tree.

In heads with several next-token layers, each layer looks one token further: row p of layer k reads
the embedding of token p + 1 + k and the state of row p of layer k - 1.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from torch import Tensor

from shared.kernels.pointwise import Partials, join_inputs, total_of
from shared.kv.batch import ForwardBatch
from shared.kv.pool import KvLayout, KvPool
from shared.layers.attention import Attention, ForwardContext, SelfAttention, plan_for
from shared.layers.decoder_layer import Mlp
from shared.layers.linear import Linear
from shared.layers.norm import RmsNorm
from shared.layers.rotary import Rotary
from shared.model_options import AttentionBackend
from shared.models.config import ModelConfig
from shared.models.heads.config import HeadConfig
from shared.models.heads.feature_spec import FeatureSpec


@dataclass(frozen=True, slots=True)
class DraftVocabulary:
    """The tokens a head can propose.

    Attributes:
        norms: norms before the lm_head, one per layer; empty in heads without such a norm.
        lm_head: `H` to Vd.
        token_ids: `[Vd]` int64, the target's id of each draft id; None when they are the same.
        vocab_size: V, the target's vocabulary size.
        size: Vd, the number of tokens that the head can propose.
    """

    norms: tuple[RmsNorm, ...]
    lm_head: Linear
    token_ids: Tensor | None
    vocab_size: int
    size: int

    def normed(self, states: Tensor, layer: int = 0) -> Tensor:
        """Returns the input of the lm_head for states `[L, H]` of one layer."""
        return self.norms[layer](states) if self.norms else states

    def logits(self, normed: Tensor) -> Tensor:
        """Returns `[L, V]` float32 for results of `normed`; -inf for tokens without a draft id."""
        scored = self.lm_head(normed).float()
        if self.token_ids is None:
            return scored
        logits = scored.new_full((len(scored), self.vocab_size), -math.inf)
        return logits.index_copy_(1, self.token_ids, scored)


@dataclass(frozen=True, slots=True)
class FeatureFusion:
    """`fc` after EAGLE-3.1's norms, on the draft's side; without norms the target applies `fc`.

    Attributes:
        joint_norm: norm over the concatenation of the K layers.
        layer_norms: one per layer, or none.
        fc: `K * H_target` to `H`.
    """

    joint_norm: RmsNorm | None
    layer_norms: tuple[RmsNorm, ...]
    fc: Linear

    def __call__(self, rows: Tensor) -> Tensor:
        """`[R, K * H_target]` to `[R, H]`."""
        if self.joint_norm is not None:
            rows = self.joint_norm(rows)
        if self.layer_norms:
            parts = rows.chunk(len(self.layer_norms), dim=-1)
            pairs = zip(self.layer_norms, parts, strict=True)
            rows = torch.cat([norm(part) for norm, part in pairs], dim=-1)
        return self.fc(rows)


@dataclass(frozen=True, slots=True)
class HeadRows:
    """The rows of a head, whose inputs are still to be gathered.

    Attributes:
        token_ids: `[T]` int64.
        embedding: `[V, H]`.
        hidden: `[R, H]`.
        sources: `[T]` int64, the row of `hidden` that each row reads; None reads them in order.
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
        """Returns the recurrent state `[T, H]` for two inputs `[T, H]`."""


@runtime_checkable
class SplitHeadLayer(HeadLayer, Protocol):
    """A layer that lets fused kernels gather its inputs and compute its last sum."""

    @property
    def state_norm(self) -> RmsNorm | None:
        """Applied to the output; None in most heads."""

    def advance(self, rows: HeadRows, context: ForwardContext) -> tuple[Tensor, Tensor | Partials]:
        """Returns two tensors `[T, H]` whose sum is the state before `state_norm`; the second may
        be unsummed `Partials`."""


@dataclass(frozen=True, slots=True)
class EagleLayer:
    """The layer of EAGLE-1 and EAGLE-2: no norm before the attention, none at the end.

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
    """EAGLE-3's layer: embedding and hidden state are concatenated as the attention's 2H input.

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


@dataclass(frozen=True, slots=True)
class DraftHead:
    """Weights and forward pass of one head.

    Attributes:
        feature_spec: the features that the target sends.
        fusion: computation on a feature row on the draft's side; None when rows arrive `H` wide.
        embedding: `[V, H]`.
        layers: one layer, or the next-token layers of a model with several.
    """

    config: HeadConfig | ModelConfig
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
        """Whether feature rows are hidden states already, so that `fuse` would return them."""
        return self.fusion is None and rows.dtype == self.dtype and rows.device == self.device

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
            batch: a row's `token_ids` entry is the token after the row's position.
            hidden: `[T, H]`, the hidden state at each row's position.
            layer: index of the layer to compute.
        """
        embedded = F.embedding(batch.token_ids, self.embedding)
        cos, signed_sin = self.rotary.tables(batch.positions)
        shape = self.layers[layer].attention.shape
        plans = {shape.sliding_window: plan_for(batch, shape, self.attention_backend)}
        context = ForwardContext(batch, pool, cos, signed_sin, plans)
        return self.layers[layer](embedded, hidden, context)

    def logits(self, states: Tensor, layer: int = 0) -> Tensor:
        """Returns `[L, V]` float32 over the target's vocabulary for states `[L, H]` of a layer."""
        return self.vocabulary.logits(self.vocabulary.normed(states, layer))
