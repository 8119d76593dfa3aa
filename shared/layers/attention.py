"""Self-attention of a decoder layer over the paged KV cache."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from shared.kernels.attention import AttentionPlan, paged_attention, plan_attention
from shared.kernels.cache import rotate_into_cache
from shared.kernels.pointwise import Partials, gated
from shared.kv.batch import ForwardBatch
from shared.kv.pool import KvPool, OwnRows
from shared.kv.state_plan import StateInputs
from shared.layers.linear import Linear
from shared.layers.norm import RmsNorm
from shared.layers.tensor_group import Part
from shared.model_options import AttentionBackend


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """Heads of one attention layer.

    Attributes:
        sliding_window: positions a row looks back, itself included; None sees everything.
        scale: factor of the scores; None is `head_dim ** -0.5`.
        cap: see `paged_attention`.
        has_sinks: see `paged_attention`.
        is_latent: values are the first part of keys, see `LatentAttention`.
        has_own_rotation: keys are rotated by the tables of sliding layers.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    sliding_window: int | None = None
    scale: float | None = None
    cap: float | None = None
    has_own_rotation: bool = False
    has_sinks: bool = False
    is_latent: bool = False

    @property
    def is_special(self) -> bool:
        """See `plan_attention`."""
        return self.cap is not None or self.has_sinks


@dataclass(frozen=True, slots=True)
class ForwardContext:
    """Tensors that all layers of one forward share, computed once.

    Attributes:
        batch: the R rows that this process attends from, of the T rows that layers compute.
        cos: `[R, 1, head_dim]` float32.
        signed_sin: `[R, 1, head_dim]` float32.
        plans: one attention plan for each sliding window among the layers.
        sliding_tables: cosine and signed sine of layers with a rotation of their own; None where
            no layer has one.
        routes: each layer appends the experts of its rows, see `FeedForward`; None where routes
            are not requested.
        states: the plan of recurrent states; None in models without them.
        read: `[T, value_size]`, buffer that each layer in turn fills with what rows read of their
            states; zeros for padding rows. None in models without recurrent states.
        own: says which of the T rows are those of `batch`; None in heads, where all are.
    """

    batch: ForwardBatch
    pool: KvPool
    cos: Tensor
    signed_sin: Tensor
    plans: Mapping[int | None, AttentionPlan]
    sliding_tables: tuple[Tensor, Tensor] | None = None
    routes: list[Tensor | None] | None = None
    states: StateInputs | None = None
    read: Tensor | None = None
    own: OwnRows | None = None

    def own_rows(self, hidden: Tensor) -> Tensor:
        """Returns the rows `[R, H]` of this process, of `[T, H]`."""
        return hidden if self.own is None else self.own.select(hidden)

    def tables_of(self, shape: AttentionShape) -> tuple[Tensor, Tensor]:
        """Returns cosine and signed sine for a layer."""
        if not shape.has_own_rotation:
            return self.cos, self.signed_sin
        assert self.sliding_tables is not None
        return self.sliding_tables


@dataclass(frozen=True, slots=True)
class NarrowHeads:
    """Keys and values of a layer that has fewer or narrower heads than its cache.

    Attributes:
        num_kv_heads: key heads of the layer; a divisor of the cache's.
        value_dim: dimension of the layer's values; at most that of keys.
    """

    num_kv_heads: int
    value_dim: int
    value_scale: float

    def widen(self, projected: Tensor, shape: AttentionShape) -> Tensor:
        """Returns the layer's projections as `[T, (num_heads + 2 * shape.num_kv_heads) *
        head_dim]`: key heads are repeated, and values are padded with zeros."""
        count, dim = self.num_kv_heads, shape.head_dim
        first_key = shape.num_heads * dim
        first_value = first_key + count * dim
        keys = projected[:, first_key:first_value].view(-1, count, dim)
        values = projected[:, first_value:].view(-1, count, self.value_dim) * self.value_scale
        heads = torch.cat((keys, F.pad(values, (0, dim - self.value_dim))), dim=1)
        wide = heads.repeat_interleave(shape.num_kv_heads // count, dim=1)
        return torch.cat((projected[:, :first_key], wide.flatten(1)), dim=1)


class SelfAttention(Protocol):
    """The first block of a decoder layer."""

    @property
    def shape(self) -> AttentionShape: ...

    def __call__(self, hidden: Tensor, context: ForwardContext) -> Tensor:
        """`[T, H]` to `[T, H]`; writes to the pool what later rows read of these."""

    def part(self, hidden: Tensor, context: ForwardContext) -> Tensor | Partials | Part:
        """Returns the result, or parts that sum to it; see `Linear.part`."""


@dataclass(frozen=True, slots=True)
class Attention:
    """Projections, rotation, cache and attention of one layer.

    Attributes:
        qkv: input to `(num_heads + 2 * num_kv_heads) * head_dim`: queries, keys, values.
        output: `num_heads * head_dim` back to the hidden size.
        qk_norm: weight `[num_heads + num_kv_heads, head_dim]`, applied to each head before
            rotation; None in most families.
        joint_norms: one norm over all query heads and one over all key heads, before rotation; None
            in most families.
        sinks: `[num_heads]`, see `paged_attention`; None in most families.
        narrow: for a cache with more key heads than the layer, or wider values; None elsewhere.
        head_gate: input to `num_heads` gates, whose sigmoids multiply the heads' results; None in
            most families.
        is_gated: after the queries, `qkv` has as many gate channels, whose sigmoids multiply the
            heads' results.
        layer: index of this layer's keys and values in the pool.
    """

    shape: AttentionShape
    qkv: Linear
    output: Linear
    qk_norm: RmsNorm | None
    layer: int
    joint_norms: tuple[RmsNorm, RmsNorm] | None = None
    sinks: Tensor | None = None
    narrow: NarrowHeads | None = None
    head_gate: Linear | None = None
    is_gated: bool = False

    def __call__(self, hidden: Tensor, context: ForwardContext) -> Tensor:
        return self.output(self._attend(hidden, context), context.own)

    def partials(self, hidden: Tensor, context: ForwardContext) -> Tensor | Partials:
        """Returns the result, or its parts; see `Linear.partials`."""
        return self.output.partials(self._attend(hidden, context))

    def part(self, hidden: Tensor, context: ForwardContext) -> Tensor | Partials | Part:
        return self.output.part(self._attend(hidden, context), context.own)

    def _attend(self, hidden: Tensor, context: ForwardContext) -> Tensor:
        """Returns `[R, num_heads * head_dim]` for the rows that this process attends from."""
        hidden, shape, pool = context.own_rows(hidden), self.shape, context.pool
        norm, gate = self.qk_norm, None
        projected = self._project(hidden)
        if self.is_gated:
            assert isinstance(projected, Tensor)
            heads, count = projected.view(len(hidden), -1, shape.head_dim), shape.num_heads
            gate = heads[:, count : 2 * count]
            projected = torch.cat((heads[:, :count], heads[:, 2 * count :]), dim=1)
        queries = rotate_into_cache(
            projected.view(len(hidden), -1, shape.head_dim),
            None if norm is None else norm.weight,
            0.0 if norm is None else norm.eps,
            context.tables_of(shape),
            (pool.keys[self.layer], pool.values[self.layer]),
            context.batch.slots,
            pool.scales[self.layer],
        )
        attended = paged_attention(
            queries,
            pool.keys[self.layer],
            pool.values[self.layer],
            context.plans[shape.sliding_window],
            scale=shape.head_dim**-0.5 if shape.scale is None else shape.scale,
            cache_scales=pool.scales[self.layer],
            cap=shape.cap,
            sinks=self.sinks,
        )
        if self.narrow is not None:
            attended = attended[..., : self.narrow.value_dim]
        if self.head_gate is not None:
            attended = gated(attended, self.head_gate(hidden).unsqueeze(-1))
        if gate is not None:
            attended = gated(attended, gate)
        return attended.reshape(len(hidden), -1)

    def _project(self, hidden: Tensor) -> Tensor | Partials:
        """Returns queries, keys and values before rotation."""
        if self.narrow is not None:
            return self.narrow.widen(self.qkv(hidden), self.shape)
        if self.is_gated:
            return self.qkv(hidden)
        if self.joint_norms is None:
            return self.qkv.partials(hidden)
        projected, dim = self.qkv(hidden), self.shape.head_dim
        keys = self.shape.num_kv_heads * dim
        query_norm, key_norm = self.joint_norms
        first_key, first_value = self.shape.num_heads * dim, projected.shape[1] - keys
        queries = query_norm(projected[:, :first_key].contiguous())
        normed_keys = key_norm(projected[:, first_key:first_value].contiguous())
        return torch.cat((queries, normed_keys, projected[:, first_value:]), dim=-1)


def plan_for(
    batch: ForwardBatch,
    shape: AttentionShape,
    backend: AttentionBackend = AttentionBackend.AUTO,
) -> AttentionPlan:
    """Plans the attention of all layers of this shape."""
    return plan_attention(
        batch,
        sliding_window=shape.sliding_window,
        num_query_groups=shape.num_heads // shape.num_kv_heads,
        backend=backend,
        is_special=shape.is_special,
        is_latent=shape.is_latent,
    )
