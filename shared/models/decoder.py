"""One decoder for all model families; their differences are in its config and layers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TypeAlias

import torch
from torch import Tensor

from shared.kernels.pointwise import Partials, embeddings, own_embeddings
from shared.kv.batch import ForwardBatch
from shared.kv.pool import KvLayout, KvPool
from shared.kv.state_plan import StateInputs
from shared.kv.states import StateLayout
from shared.layers.attention import AttentionShape, ForwardContext, plan_for
from shared.layers.decoder_layer import DecoderLayer, stream_of
from shared.layers.gated_delta import GatedDelta
from shared.layers.linear import Linear
from shared.layers.norm import RmsNorm
from shared.layers.rotary import Rotary
from shared.layers.tensor_group import Part, TensorGroup
from shared.model_options import AttentionBackend
from shared.models.config import ModelConfig
from shared.models.scaled_weights import StoredLayout
from shared.models.shard import WHOLE, Shard, shard_of

ROUTES = -1
"""In `capture_layers`: the routes of a forward's rows, that is their experts in all layers."""
_Stream: TypeAlias = tuple[Tensor | Part, Tensor | Partials | Part | None]
"""The residual stream as `DecoderLayer.advance` takes it."""


@dataclass(frozen=True, slots=True)
class DecoderOutput:
    """The outputs of a forward for its T rows.

    Attributes:
        hidden: `[T, H]` after the final norm.
        features: one `[T, H]` for each captured layer, the residual stream that enters it; for
            `ROUTES` `[T, num_layers * k]` int32, 0 for layers without experts.
    """

    hidden: Tensor
    features: tuple[Tensor, ...]


@dataclass(frozen=True, slots=True)
class Decoder:
    """Weights and forward pass of one model.

    Attributes:
        embedding: `[V, H]`; draft heads without an embedding of their own read it too.
        layers: layers of this process's stage; all layers without pipeline parallelism.
        lm_head: `H` to `V`.
        group: processes that share the model; V is then this process's part of the vocabulary.
        sliding_rotary: rotation of sliding layers, where they have their own.
        token_map: `[Vd]` int64, the token id of each row of lm_head, ascending; None where row and
            id are the same. See `loader.in_other_vocabulary`.
        layouts: layouts of the tensors of `decoder_parts` that stay in a checkpoint's 8 bits.
    """

    config: ModelConfig
    embedding: Tensor
    layers: tuple[DecoderLayer, ...]
    norm: RmsNorm
    lm_head: Linear
    rotary: Rotary
    attention_backend: AttentionBackend = AttentionBackend.AUTO
    group: TensorGroup | None = None
    sliding_rotary: Rotary | None = None
    token_map: Tensor | None = None
    layouts: Mapping[str, StoredLayout] = field(default_factory=dict, compare=False)

    @property
    def num_proposed(self) -> int:
        """Number of tokens with a row in the lm_head."""
        return self.config.vocab_size if self.token_map is None else len(self.token_map)

    @property
    def device(self) -> torch.device:
        return self.embedding.device

    @property
    def dtype(self) -> torch.dtype:
        return self.embedding.dtype

    @property
    def shard(self) -> Shard:
        """The part of the model that this process holds."""
        return shard_of(self.group)

    @property
    def plans_prompts_by_size(self) -> bool:
        """Whether only the numbers of rows and sequences decide which kernels compute prompts, as a
        CUDA graph needs, in all stages. With caps, sinks, latent or linear attention the lengths of
        prompts count too."""
        shapes = [attention_shape(self.config, layer) for layer in range(self.config.num_layers)]
        return (
            self.attention_backend is not AttentionBackend.TORCH
            and self.config.delta is None
            and not any(shape.is_special or shape.is_latent for shape in shapes)
        )

    def kv_layout(self, page_size: int, dtype: torch.dtype | None = None) -> KvLayout:
        """Returns the layout of this model's cache, in `dtype` or the model's own."""
        config = self.config
        return KvLayout(
            num_layers=len(self.shard.cache_layers(config)),
            num_kv_heads=self.layers[0].attention.shape.num_kv_heads,
            head_dim=config.head_dim,
            page_size=page_size,
            dtype=dtype or self.dtype,
            has_values=config.latent is None,
            states=_state_layout(config),
        )

    def forward(
        self,
        batch: ForwardBatch,
        pool: KvPool,
        *,
        capture_layers: tuple[int, ...] = (),
        states: StateInputs | None = None,
    ) -> DecoderOutput:
        """Computes the rows of `batch` and writes their keys and values to `pool`.

        Args:
            capture_layers: layers whose input is returned, in this order; `num_layers` stands for
                the output of the last layer, before the final norm, and `ROUTES` for the rows'
                experts.
            states: the uploaded plan that `KvPool.advancing` makes for the batch.
        """
        context = self._context(batch, pool, states, has_routes=ROUTES in capture_layers)
        captured: dict[int, Tensor] = {}
        embedded, wanted = self._embed(batch.token_ids), frozenset(capture_layers)
        advance = self._run_layers if self.shard.num_stages == 1 else self._run_stages
        hidden, update = advance(embedded, context, wanted, captured)
        captured[self.config.num_layers], normed = self.norm.add(hidden, update)
        features = tuple(captured[index] for index in capture_layers)
        return DecoderOutput(normed, features)

    def advance_states(self, pool: KvPool, states: StateInputs) -> None:
        """Advances recurrent states by a plan of sequences without rows."""
        for layer in self.layers:
            if isinstance(layer.attention, GatedDelta):
                layer.attention.advance(states, pool)

    def _run_layers(
        self,
        hidden: Tensor | Part,
        context: ForwardContext,
        wanted: frozenset[int],
        captured: dict[int, Tensor],
    ) -> _Stream:
        """Computes this process's layers on the residual stream.

        Args:
            wanted: see `capture_layers` of `forward`.
            captured: receives the wanted inputs of this process's layers.
        """
        update: Tensor | Partials | Part | None = None
        for index, layer in zip(self.shard.layers(self.config), self.layers, strict=True):
            entered, hidden, update = layer.advance(hidden, update, context)
            if index in wanted:
                captured[index] = entered
        if context.routes is not None:
            assert isinstance(hidden, Tensor), "a stage has a layer"
            none = self._no_routes(hidden, 1)
            routes = [
                none if experts is None else experts.to(torch.int32) for experts in context.routes
            ]
            captured[ROUTES] = torch.cat(routes, 1)
        return hidden, update

    def _run_stages(
        self,
        hidden: Tensor | Part,
        context: ForwardContext,
        wanted: frozenset[int],
        captured: dict[int, Tensor],
    ) -> _Stream:
        """Computes the layers of all stages, one stage after another, each with `_run_layers`. Each
        stage broadcasts the residual stream that leaves it, and its captured layers."""
        stream, routes = stream_of(hidden, None), list[Tensor]()
        for stage in range(self.shard.num_stages):
            layers = replace(self.shard, stage=stage).layers(self.config)
            if layers.start in wanted:
                captured[layers.start] = stream
            inner = sorted(wanted.intersection(layers[1:]))
            if stage == self.shard.stage:
                output = self._run_layers(stream, context, wanted, captured)
                names = [*inner, ROUTES] if ROUTES in wanted else inner
                sent = [stream_of(*output), *(captured[name] for name in names)]
            else:
                sent = [torch.empty_like(stream) for _ in range(1 + len(inner))]
                sent += [self._no_routes(stream, len(layers))] if ROUTES in wanted else []
            for tensor in sent:
                assert self.group is not None, "only a group has stages"
                self.group.broadcast(tensor, stage=stage)
            stream = sent[0]
            captured.update(zip(inner, sent[1:], strict=False))
            routes += sent[1 + len(inner) :]
        if routes:
            captured[ROUTES] = torch.cat(routes, 1)
        return stream, None

    def _no_routes(self, rows: Tensor, num_layers: int) -> Tensor:
        """Returns the routes `[T, num_layers * k]` of layers without experts: int32 zeros."""
        assert self.config.experts is not None, "a dense model has no routes"
        size = len(rows), num_layers * self.config.experts.routing.num_chosen
        return rows.new_zeros(size, dtype=torch.int32)

    def logits(self, hidden_rows: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        """Returns `[L, V]` over all tokens for `hidden_rows` `[L, H]` after the final norm; -inf
        for tokens without a row in the lm_head."""
        scored = self.own_logits(hidden_rows, dtype)
        if self.token_map is None:
            return scored
        logits = scored.new_full((len(scored), self.config.vocab_size), -math.inf)
        return logits.index_copy_(1, self.token_map, scored)

    def own_logits(self, hidden_rows: Tensor, dtype: torch.dtype) -> Tensor:
        """Returns `[L, Vd]` over the lm_head's rows of all processes."""
        logits = self.lm_head(hidden_rows)
        if self.group is None:
            return logits.to(dtype)
        return self.group.joined(logits, dtype)

    def _embed(self, token_ids: Tensor) -> Tensor | Part:
        """Returns `[T, H]`; in a group one process has a token's row, and the others add zeros."""
        group, scale = self.group, self.config.embedding_scale
        if group is None:
            rows = embeddings(token_ids, self.embedding)
        else:
            rows = own_embeddings(token_ids, self.embedding, group.rank * len(self.embedding))
        if scale != 1.0:  # rounded to the model's dtype, as in training
            rows = rows * torch.tensor(scale, dtype=rows.dtype).item()
        return rows if group is None else Part(rows, group)

    def _context(
        self, batch: ForwardBatch, pool: KvPool, states: StateInputs | None, *, has_routes: bool
    ) -> ForwardContext:
        own = pool.own(batch)
        batch = own.batch
        shapes = {layer.attention.shape for layer in self.layers}
        plans = {
            shape.sliding_window: plan_for(batch, shape, self.attention_backend) for shape in shapes
        }
        sliding = self.sliding_rotary
        sliding_tables = None if sliding is None else sliding.tables(batch.positions)
        routes: list[Tensor | None] | None = [] if has_routes else None
        read = None
        if self.config.delta is not None:
            size = len(batch.token_ids), self.config.delta.shape.value_size
            read = torch.zeros(size, dtype=self.dtype, device=self.device)
        tables = self.rotary.tables(batch.positions)
        return ForwardContext(
            batch, pool, *tables, plans, sliding_tables, routes, states, read, own
        )


def _state_layout(config: ModelConfig) -> StateLayout | None:
    if config.delta is None:
        return None
    shape = config.delta.shape
    return StateLayout(
        num_layers=len(config.delta.layers),
        num_heads=shape.num_value_heads,
        key_dim=shape.key_dim,
        value_dim=shape.value_dim,
        window=shape.window,
        first_layer=config.first_cache_layer(config.delta.layers[0]),
        layers_each=config.cache_layers_each,
    )


def attention_shape(config: ModelConfig, layer: int, shard: Shard = WHOLE) -> AttentionShape:
    """Returns the heads and window of one layer in this shard."""
    shard = shard.of_attention
    return AttentionShape(
        num_heads=shard.layer_heads(config, layer),
        num_kv_heads=shard.num_kv_heads(config),
        head_dim=config.head_dim,
        sliding_window=config.sliding_windows[layer],
        scale=config.attention_scale,
        cap=config.attention_cap,
        has_sinks=config.layer_has_sinks(layer),
        is_latent=config.latent is not None,
        has_own_rotation=config.layer_has_own_rotation(layer),
    )
