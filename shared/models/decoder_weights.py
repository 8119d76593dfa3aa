"""The name maps of decoder checkpoints: dense layers, experts, latent attention, delta rule."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from shared.kernels.delta_rule import DeltaWeights
from shared.kernels.experts import ExpertWeight
from shared.kernels.linear import can_be_batch_invariant
from shared.kernels.quantised import StoredMatrix
from shared.layers.attention import AttentionShape
from shared.layers.decoder_layer import Mlp
from shared.layers.experts import Experts, Router
from shared.layers.gated_delta import GatedDelta
from shared.layers.latent_attention import LatentAttention
from shared.layers.linear import STORED_DTYPES, Linear
from shared.layers.norm import RmsNorm
from shared.layers.tensor_group import TensorGroup
from shared.model_options import Quantisation
from shared.models.checkpoint import Cut
from shared.models.config import LatentConfig, ModelConfig
from shared.models.families import NormPlacement
from shared.models.layer_configs import ExpertConfig
from shared.models.shard import WHOLE, Shard, shard_of
from shared.models.weights import WeightPart, WeightTensors


def linear_from(
    tensors: WeightTensors,
    name: str,
    quantisation: Quantisation,
    group: TensorGroup | None = None,
) -> Linear:
    """Removes weight and bias, if there is one, from the dict and returns their layer."""
    weight, bias = tensors.pop_matrix(f"{name}.weight"), tensors.pop(f"{name}.bias", None)
    return Linear.of(weight, bias, quantisation, group)


def norm_from(config: ModelConfig, tensors: dict[str, Tensor], name: str) -> RmsNorm:
    """Removes the weight of a norm from the dict and returns its layer.

    A weight with an offset is held in float32: in half precision the sum would lose the small
    learnt part.
    """
    weight = tensors.pop(name)
    if config.family.norm_offset:
        weight = weight.float() + config.family.norm_offset
    return RmsNorm(weight, config.rms_norm_eps)


@dataclass(frozen=True, slots=True)
class LayerTensors:
    """The tensors of one layer, see `layer_parts`; builders remove them from the dict.

    Attributes:
        group: group of the whole model.
    """

    config: ModelConfig
    tensors: WeightTensors
    layer: int
    quantisation: Quantisation
    group: TensorGroup | None

    @property
    def prefix(self) -> str:
        return f"layers.{self.layer}."

    @property
    def own_group(self) -> TensorGroup | None:
        """The group that shares this layer; None where the process has it alone."""
        return None if self.group is None else self.group.of_layers

    @property
    def cache_layer(self) -> int:
        """Index of the layer's rows in this process's cache."""
        return shard_of(self.group).cache_layer(self.config, self.layer)

    def has(self, name: str) -> bool:
        return f"{self.prefix}{name}" in self.tensors

    def pop(self, name: str) -> Tensor:
        return self.tensors.pop(f"{self.prefix}{name}")

    def pop_if_any(self, name: str) -> Tensor | None:
        return self.tensors.pop(f"{self.prefix}{name}", None)

    def linear(self, name: str, group: TensorGroup | None = None) -> Linear:
        return linear_from(self.tensors, f"{self.prefix}{name}", self.quantisation, group)

    def norm(self, name: str) -> RmsNorm:
        return norm_from(self.config, self.tensors, f"{self.prefix}{name}")

    def plain_norm(self, name: str) -> RmsNorm:
        """Removes and returns a norm that has no offset in any family."""
        return RmsNorm(self.pop(name), self.config.rms_norm_eps)


# The name map of gated delta layers, and the layer of its tensors.


def delta_parts(config: ModelConfig, source: str, target: str) -> Iterator[WeightPart]:
    """Yields the tensors of one layer, see `decoder_weights.layer_parts`."""
    assert config.delta is not None
    shape, hidden = config.delta.shape, config.hidden_size
    source, num_heads = f"{source}linear_attn.", shape.num_value_heads
    matrices: list[tuple[str, int, str, tuple[int, ...] | None]]
    if config.family.has_fused_delta:
        # Grouped by key heads in the checkpoint.
        num_groups, size = shape.num_key_heads, shape.num_channels + shape.value_size
        values, heads = shape.value_size // num_groups, num_heads // num_groups
        order = _by_kind(num_groups, (shape.key_dim, shape.key_dim, values, values))
        matrices = [
            ("in_proj_qkvz", size, "channels", order),
            ("in_proj_ba", 2 * num_heads, "gates", _by_kind(num_groups, (heads, heads))),
        ]
    else:
        matrices = [
            ("in_proj_qkv", shape.num_channels, "channels", None),
            ("in_proj_z", shape.value_size, "channels", None),
            ("in_proj_b", num_heads, "gates", None),
            ("in_proj_a", num_heads, "gates", None),
        ]
    for key, size, name, row_order in matrices:
        part = WeightPart.matrix(
            f"{source}{key}.weight", (size, hidden), f"{target}{name}.weight", None, row_order
        )
        yield replace(part, may_stay=name == "channels")
    taps = (shape.num_channels, 1, shape.window)
    yield WeightPart(f"{source}conv1d.weight", taps, f"{target}taps")
    for key in ("A_log", "dt_bias"):
        yield WeightPart(f"{source}{key}", (num_heads,), f"{target}{key}", dtype=torch.float32)
    yield WeightPart(f"{source}norm.weight", (shape.value_dim,), f"{target}delta_norm")
    size = shape.value_size
    yield WeightPart.matrix(f"{source}out_proj.weight", (hidden, size), f"{target}output.weight")


def build_delta(weights: LayerTensors, shape: AttentionShape) -> GatedDelta:
    """Builds one delta layer; removes its tensors from the dict."""
    config = weights.config
    assert config.delta is not None
    return GatedDelta(
        shape=shape,
        delta=config.delta.shape,
        channels=weights.linear("channels"),
        # Not quantised: these few rows influence all later states.
        gates=replace(weights, quantisation=Quantisation.UNQUANT).linear("gates"),
        weights=DeltaWeights(
            weights.pop("taps").squeeze(1), weights.pop("A_log"), weights.pop("dt_bias")
        ),
        norm=weights.plain_norm("delta_norm"),
        output=weights.linear("output"),
        layer=config.first_cache_layer(weights.layer),
        state=config.delta.layers.index(weights.layer),
    )


def _by_kind(num_groups: int, sizes: tuple[int, ...]) -> tuple[int, ...]:
    """Returns the order of rows by kind, of which each group has `sizes` in the checkpoint."""
    group_size, first, order = sum(sizes), 0, list[int]()
    for size in sizes:
        for group in range(num_groups):
            start = group * group_size + first
            order.extend(range(start, start + size))
        first += size
    return tuple(order)


# The name map of latent attention, and the layer of its tensors.


def latent_parts(
    config: ModelConfig, source: str, target: str, shard: Shard
) -> Iterator[WeightPart]:
    """Yields the tensors of one layer's attention, see `decoder_weights.layer_parts`.

    A shard has a part of the heads; every process computes the whole latent vector.
    """
    latent, hidden = config.latent, config.hidden_size
    assert latent is not None
    source = f"{source}self_attn."
    by_head, row_order = _row_orders(config, latent)

    def matrix(
        key: str,
        shape: tuple[int, int],
        name: str,
        cut: Cut | None = None,
        row_order: tuple[int, ...] | None = None,
    ) -> WeightPart:
        return WeightPart.matrix(
            f"{source}{key}.weight", shape, f"{target}{name}.weight", cut, row_order
        )

    heads = config.num_heads * latent.query_dim
    cut = shard.cut(0, heads)
    has_bias = config.has_qkv_bias
    if latent.query_rank is None:
        yield matrix("q_proj", (heads, hidden), "compress", cut, by_head)
        has_bias = False
    else:
        rank = latent.query_rank
        yield matrix("q_a_proj", (rank, hidden), "compress")
        if has_bias:
            yield WeightPart(f"{source}q_a_proj.bias", (rank,), f"{target}compress.bias")
        yield WeightPart(f"{source}q_a_layernorm.weight", (rank,), f"{target}query_norm")
        yield matrix("q_b_proj", (heads, rank), "queries", cut, by_head)
    key = "kv_a_proj_with_mqa"
    yield matrix(key, (latent.row_dim, hidden), "compress", row_order=row_order)
    if has_bias:
        yield WeightPart(
            f"{source}{key}.bias", (latent.row_dim,), f"{target}compress.bias", row_order=row_order
        )
    yield WeightPart(f"{source}kv_a_layernorm.weight", (latent.latent_dim,), f"{target}latent_norm")
    expanded = latent.unrotated_dim + latent.value_dim
    # Not a `matrix`, which may stay in 8 bits: this one is split by heads before use.
    yield WeightPart(
        f"{source}kv_b_proj.weight",
        (config.num_heads * expanded, latent.latent_dim),
        f"{target}expand",
        cut=shard.cut(0, config.num_heads * expanded),
    )
    attended = config.num_heads * latent.value_dim
    yield matrix("o_proj", (hidden, attended), "output", shard.cut(1, attended))
    if config.has_output_bias:
        yield WeightPart(f"{source}o_proj.bias", (hidden,), f"{target}output.bias")


def build_latent(weights: LayerTensors, shape: AttentionShape) -> LatentAttention:
    """Builds one latent attention; removes its tensors from the dict."""
    latent = weights.config.latent
    assert latent is not None
    is_uncompressed = latent.query_rank is None
    expand = weights.pop("expand").view(shape.num_heads, -1, latent.latent_dim)
    return LatentAttention(
        shape=shape,
        compress=weights.linear("compress"),
        query_norm=None if is_uncompressed else weights.plain_norm("query_norm"),
        queries=None if is_uncompressed else weights.linear("queries"),
        latent_norm=weights.plain_norm("latent_norm"),
        key_up=expand[:, : latent.unrotated_dim].contiguous(),
        value_up=expand[:, latent.unrotated_dim :].contiguous(),
        output=weights.linear("output", weights.own_group),
        layer=weights.cache_layer,
    )


def _row_orders(
    config: ModelConfig, latent: LatentConfig
) -> tuple[tuple[int, ...] | None, tuple[int, ...] | None]:
    """Returns the order of a query head's rows, and of the rows that make a row of the cache; the
    rotated part comes last in both."""
    order = config.rope.dim_order(latent.rotary_dim)
    if order is None:
        return None, None

    def after(count: int) -> tuple[int, ...]:
        return (*range(count), *(count + index for index in order))

    return after(latent.unrotated_dim), after(latent.latent_dim)


# The name map of a block of experts, and the block of its tensors.


def expert_parts(
    config: ExpertConfig,
    hidden: int,
    source: str,
    target: str,
    shard: Shard,
    *,
    has_stacks: bool = False,
) -> Iterator[WeightPart]:
    """Yields the tensors of one block of experts, see `decoder_weights.layer_parts`.

    A shard holds some channels of every expert, or some experts.

    Args:
        has_stacks: the checkpoint has a layer's experts as one tensor, where the family allows it.
    """
    keys, wide = config.family.keys, config.intermediate_size
    layer, source = source, f"{source}{keys.block}"
    router, num_experts = f"{source}{keys.router}", config.routing.num_experts
    yield WeightPart(f"{router}.weight", (num_experts, hidden), f"{target}router.weight")
    if config.family.has_correction:
        yield WeightPart(
            f"{source}{keys.correction}",
            (num_experts,),
            f"{target}router.correction",
            dtype=torch.float32,
        )
    if config.family.has_biases:
        yield WeightPart(f"{router}.bias", (num_experts,), f"{target}router.bias")
    stacks = _expert_stacks(config, hidden, source, target, shard, has_stacks=has_stacks)
    inner, outer = shard.of_experts.cut(0, wide), shard.of_experts.cut(1, wide)
    for expert in shard.experts(num_experts):
        if stacks:
            yield from (replace(stack, index=expert) for stack in stacks)
            continue
        prefix = f"{source}experts.{expert}."
        for key in (keys.gate, keys.up):
            gate_up = f"{target}experts.gate_up"
            yield WeightPart.matrix(f"{prefix}{key}.weight", (wide, hidden), gate_up, inner)
        down = f"{target}experts.down"
        yield WeightPart.matrix(f"{prefix}{keys.down}.weight", (hidden, wide), down, outer)
    if config.shared_size:
        root = layer if keys.has_shared_apart else source
        yield from _shared_parts(config, hidden, root, target, shard)
        if keys.shared_gate is not None:
            yield WeightPart(
                f"{root}{keys.shared_gate}.weight", (1, hidden), f"{target}shared.gate.weight"
            )


def _expert_stacks(
    config: ExpertConfig, hidden: int, source: str, target: str, shard: Shard, *, has_stacks: bool
) -> list[WeightPart]:
    """Returns the parts of the first expert in tensors that stack the matrices of all experts;
    empty where each expert has tensors of its own."""
    family, keys, wide = config.family, config.family.keys, config.intermediate_size
    part, count = shard.of_experts, config.routing.num_experts
    num_channels, outer = wide // part.size, part.cut(1, wide)
    first = part.rank * num_channels
    halves = [Cut(0, start, num_channels) for start in (first, wide + first)]

    def stack(
        key: str,
        shape: tuple[int, ...],
        name: str,
        cut: Cut | None,
        row_order: tuple[int, ...] | None = None,
    ) -> WeightPart:
        return WeightPart(
            f"{source}{key}",
            (count, *shape),
            f"{target}experts.{name}",
            cut=cut,
            row_order=row_order,
            index=0,
            keeps_order=not family.is_stacked,
        )

    if family.is_stacked_apart:
        inner = part.cut(0, wide)
        return [
            stack(f"{keys.gate}.weight", (wide, hidden), "gate_up", inner),
            stack(f"{keys.up}.weight", (wide, hidden), "gate_up", inner),
            stack(f"{keys.down}.weight", (hidden, wide), "down", outer),
        ]
    gate_up, down = "experts.gate_up_proj", "experts.down_proj"
    if family.may_be_stacked and has_stacks:
        stacks = [stack(gate_up, (2 * wide, hidden), "gate_up", cut) for cut in halves]
        return [*stacks, stack(down, (hidden, wide), "down", outer)]
    if not family.is_stacked:
        return []
    down_stack = stack(down, (wide, hidden), "down", outer)
    if not family.has_biases:
        stacks = [stack(gate_up, (hidden, 2 * wide), "gate_up", cut) for cut in halves]
        return [*stacks, down_stack]
    # Gate and up of a channel are neighbours.
    inner = Cut(0, 2 * first, 2 * num_channels)
    order = (*range(0, 2 * num_channels, 2), *range(1, 2 * num_channels, 2))
    return [
        stack(gate_up, (hidden, 2 * wide), "gate_up", inner, order),
        stack(f"{gate_up}_bias", (2 * wide,), "gate_up_bias", inner, order),
        stack(f"{down}_bias", (hidden,), "down_bias", None),
        down_stack,
    ]


def _shared_parts(
    config: ExpertConfig, hidden: int, source: str, target: str, shard: Shard
) -> Iterator[WeightPart]:
    keys, wide = config.family.keys, config.shared_size
    inner, outer = shard.cut(0, wide), shard.cut(1, wide)
    source, target = f"{source}{keys.shared}", f"{target}shared."
    for key in ("gate_proj", "up_proj"):
        gate_up = f"{target}gate_up.weight"
        yield WeightPart.matrix(f"{source}{key}.weight", (wide, hidden), gate_up, inner)
    down = f"{target}down.weight"
    yield WeightPart.matrix(f"{source}down_proj.weight", (hidden, wide), down, outer)


def build_experts(weights: LayerTensors) -> Experts:
    """Builds one block of experts; removes its tensors from the dict."""
    config, group, activation = weights.config.experts, weights.own_group, weights.config.activation
    assert config is not None
    shared_limit, limit = weights.config.layer_limits(weights.layer)
    num_experts, stored = config.routing.num_experts, STORED_DTYPES.get(weights.quantisation)
    is_spread = group is not None and group.spreads_experts
    if is_spread:
        assert group is not None
        num_experts //= group.size

    def stacked(name: str) -> ExpertWeight:
        weight = weights.tensors.pop_matrix(f"{weights.prefix}experts.{name}")
        bias = weights.pop_if_any(f"experts.{name}_bias")
        if bias is not None:
            bias = bias.view(num_experts, -1)
            # The group sums the processes' results, so only one of them adds the bias.
            if name == "down" and group is not None and group.rank > 0 and not is_spread:
                bias = torch.zeros_like(bias)
        if isinstance(weight, StoredMatrix):
            return ExpertWeight.kept(weight, num_experts, bias)
        return ExpertWeight.of(weight.view(num_experts, -1, weight.shape[1]), bias, stored)

    shared = None
    if config.shared_size:
        # No sum of its own: the group's sum over the whole block includes it.
        down = replace(weights.linear("shared.down", group), group=None)
        shared = Mlp(weights.linear("shared.gate_up"), down, activation, shared_limit)
    shared_gate = weights.pop_if_any("shared.gate.weight")
    router, is_wide = weights.pop("router.weight"), config.family.is_wide
    if is_wide and not can_be_batch_invariant(router):
        router = router.float()
    return Experts(
        router=Router(
            weight=Linear.of(router, weights.pop_if_any("router.bias")),
            correction=weights.pop_if_any("router.correction"),
            routing=config.routing,
            is_wide=is_wide,
        ),
        gate_up=stacked("gate_up"),
        down=stacked("down"),
        activation=activation,
        shared=shared,
        group=group,
        scales_inputs=config.family.scales_inputs,
        limit=limit,
        shared_gate=None if shared_gate is None else Linear.of(shared_gate),
    )


# Buffers in some checkpoints, which are no weights.
_BUFFERS = (".rotary_emb.inv_freq", ".masked_bias", ".attn.bias")
# Scales of activations and of a KV cache that were measured on texts. Activations are rounded with
# scales of their own, see `quantised.quantised_rows`; those of a cache come from the weights.
_MEASURED_SCALES = (
    *(".input_scale", ".input_scale_ub", ".input_zero_point"),
    *(".output_scale", ".k_scale", ".v_scale"),
)
IGNORED_SUFFIXES = (*_BUFFERS, *_MEASURED_SCALES)
LM_HEAD_KEY = "lm_head.weight"
_EMBEDDING = "embed_tokens.weight"
_PLAIN_ROOT = "model."
# Prefixes of the text model in checkpoints that have a vision model too, and of the vision model.
_ROOTS = (_PLAIN_ROOT, "model.language_model.", "language_model.model.")
_VISION_PREFIXES = (
    "vision_tower.",
    "vision_model.",
    "multi_modal_projector.",
    "vit_large_projector.",
    "model.vision_tower.",
    "model.multi_modal_projector.",
    "model.visual.",
)
_STACK = ".experts.gate_up_proj"
_NORMS = {
    NormPlacement.BEFORE: {
        "input_layernorm": "attention_norm",
        "post_attention_layernorm": "mlp_norm",
    },
    NormPlacement.AFTER: {
        "post_attention_layernorm": "attention_output_norm",
        "post_feedforward_layernorm": "mlp_output_norm",
    },
    NormPlacement.AROUND: {
        "input_layernorm": "attention_norm",
        "post_attention_layernorm": "attention_output_norm",
        "pre_feedforward_layernorm": "mlp_norm",
        "post_feedforward_layernorm": "mlp_output_norm",
    },
}


@dataclass(frozen=True, slots=True)
class DecoderKeys:
    """Key prefixes of the decoder in a checkpoint.

    Attributes:
        root: prefix of the keys of embedding, layers and norm.
        lm_head: the key of the lm_head.
        ignored_prefixes: prefixes of the keys of other models in the folder.
        has_stacks: a layer's experts are one tensor; for families whose checkpoints differ in this.
    """

    root: str = _PLAIN_ROOT
    lm_head: str = LM_HEAD_KEY
    ignored_prefixes: tuple[str, ...] = ()
    has_stacks: bool = False

    @classmethod
    def of(cls, keys: Collection[str]) -> DecoderKeys:
        """Finds the decoder among the keys of a checkpoint."""
        root = next((root for root in _ROOTS if f"{root}{_EMBEDDING}" in keys), _PLAIN_ROOT)
        has_stacks = any(key.endswith(_STACK) for key in keys)
        if root == _PLAIN_ROOT:
            has_vision = any(key.startswith(_VISION_PREFIXES) for key in keys)
            ignored = _VISION_PREFIXES if has_vision else ()
            return cls(ignored_prefixes=ignored, has_stacks=has_stacks)
        nested = f"language_model.{LM_HEAD_KEY}"
        lm_head = nested if nested in keys else LM_HEAD_KEY
        return cls(root, lm_head, _VISION_PREFIXES, has_stacks)

    @property
    def embedding(self) -> str:
        return f"{self.root}{_EMBEDDING}"


def _product(
    key: str,
    shape: tuple[int, int],
    target: str,
    cut: Cut | None,
    row_order: tuple[int, ...] | None = None,
    *,
    rows: Cut | None = None,
    has_bias: bool,
) -> Iterator[WeightPart]:
    """Yields one matrix of a layer, and its bias if it has one.

    Args:
        key: name in the checkpoint, without `.weight`.
        shape: shape of the whole tensor there.
        target: name of the tensor that the matrix becomes part of, without `.weight`.
        cut: the part of the matrix that the shard holds; None holds all.
        rows: the rows of the matrix, in a tensor that fuses several matrices; None is all rows.
    """
    bias_cut = rows
    if cut is not None and cut.dim == 0:
        start = cut.start + (0 if rows is None else rows.start)
        bias_cut = Cut(0, start, cut.length)
    weight_cut = cut if cut is not None and cut.dim == 1 else bias_cut
    yield WeightPart.matrix(f"{key}.weight", shape, f"{target}.weight", weight_cut, row_order)
    if has_bias:
        yield WeightPart(
            f"{key}.bias", shape[:1], f"{target}.bias", cut=bias_cut, row_order=row_order
        )


def decoder_parts(
    config: ModelConfig,
    shard: Shard = WHOLE,
    keys: DecoderKeys = DecoderKeys(),
) -> tuple[WeightPart, ...]:
    """Lists every tensor of the decoder, in the order in which fused ones are stacked."""
    hidden = config.hidden_size
    table, tokens = (config.vocab_size, hidden), shard.vocabulary(config)
    rows = None if shard.num_parts == 1 else Cut(0, tokens.start, len(tokens))
    parts = [WeightPart(keys.embedding, table, "embedding", cut=rows)]
    for layer in shard.layers(config):
        source = f"{keys.root}layers.{layer}."
        has_experts = config.has_experts(layer)
        parts.extend(
            layer_parts(
                config,
                source,
                f"layers.{layer}.",
                shard,
                layer=layer,
                has_experts=has_experts,
                has_stacks=keys.has_stacks,
            )
        )
    parts.append(WeightPart(f"{keys.root}norm.weight", (hidden,), "norm"))
    if not config.tie_word_embeddings:
        parts.append(WeightPart(keys.lm_head, table, "lm_head", cut=rows))
    return tuple(parts)


def keys_of_others(
    config: ModelConfig, shard: Shard, keys: DecoderKeys = DecoderKeys()
) -> frozenset[str]:
    """Returns the keys of tensors that only other processes hold: their layers and experts."""
    if not shard.spreads_experts and shard.num_stages == 1:
        return frozenset()
    own_keys = {part.key for part in decoder_parts(config, shard, keys)}
    return frozenset(part.key for part in decoder_parts(config, WHOLE, keys)) - own_keys


def layer_parts(
    config: ModelConfig,
    source: str,
    target: str,
    shard: Shard = WHOLE,
    *,
    layer: int = -1,
    has_experts: bool = False,
    has_stacks: bool = False,
) -> Iterator[WeightPart]:
    """Yields the tensors of one layer; `source` is the prefix of their keys, `target` the prefix of
    their names.

    A shard holds a part of the heads and of the feed-forward channels. Matrices that read the
    residual stream are cut by outputs, and those that write to it by inputs. A bias of the latter
    is added after the sum over processes, so it is not cut.
    """
    heads = shard.of_attention
    for key, name in _NORMS[config.family.norms].items():
        yield WeightPart(f"{source}{key}.weight", (config.hidden_size,), f"{target}{name}")
    if config.has_state(layer):
        yield from delta_parts(config, source, target)
    elif config.latent is None:
        yield from _attention_parts(config, f"{source}self_attn.", target, heads, layer)
    else:
        yield from latent_parts(config, source, target, heads)
    if has_experts:
        assert config.experts is not None
        yield from expert_parts(
            config.experts, config.hidden_size, source, target, shard, has_stacks=has_stacks
        )
    else:
        yield from _mlp_parts(config, f"{source}{config.family.mlp_block}", target, shard)
    if not config.has_state(layer):
        yield from _head_norms(config, source, target, heads, layer)
    if config.family.has_head_gates:
        gates = (config.layer_heads(layer), config.hidden_size)
        yield WeightPart(f"{source}self_attn.g_proj.weight", gates, f"{target}head_gate.weight")
    if config.layer_has_sinks(layer):
        cut = heads.cut(0, config.num_heads)
        yield WeightPart(
            f"{source}self_attn.{config.family.sinks_key}",
            (config.num_heads,),
            f"{target}sinks",
            cut=cut,
        )


def _head_norms(
    config: ModelConfig, source: str, target: str, shard: Shard, layer: int
) -> Iterator[WeightPart]:
    dim = config.head_dim
    if config.has_qk_norm:
        order = config.layer_rope(layer).dim_order(dim)
        num_heads, num_kv_heads = shard.layer_heads(config, layer), shard.num_kv_heads(config)
        for key, repeats in (("q_norm", num_heads), ("k_norm", num_kv_heads)):
            yield WeightPart(
                f"{source}self_attn.{key}.weight", (dim,), f"{target}qk_norm", repeats, None, order
            )
    if config.norms_all_heads:
        for key, num_heads, name in (
            ("q_norm", config.num_heads, "query_norm"),
            ("k_norm", config.num_kv_heads, "key_norm"),
        ):
            yield WeightPart(
                f"{source}self_attn.{key}.weight", (num_heads * dim,), f"{target}{name}"
            )


def _attention_parts(
    config: ModelConfig, source: str, target: str, shard: Shard, layer: int
) -> Iterator[WeightPart]:
    hidden, dim = config.hidden_size, config.head_dim
    value_dim = dim if config.hybrid is None else config.hybrid.value_dim
    num_kv_heads = config.layer_kv_heads(layer)
    num_heads = config.layer_heads(layer)
    queries, keys = num_heads * dim, num_kv_heads * dim
    values, attended = num_kv_heads * value_dim, num_heads * value_dim
    order = config.layer_rope(layer).dim_order(dim)
    query_order, gates = order, 0
    if config.family.is_gated:
        query_order, gates = _query_gate_order(num_heads, dim, order), queries
    size = config.num_heads * dim
    query_cut, output_cut, key_cut = shard.cut(0, size), shard.cut(1, size), None
    if shard.size > 1:
        key_cut = Cut(0, shard.first_kv_head(config) * dim, shard.num_kv_heads(config) * dim)
    first_row, is_fused = 0, config.family.has_fused_matrices
    for key, num_rows, cut, row_order in (
        ("q_proj", queries + gates, query_cut, query_order),
        ("k_proj", keys, key_cut, order),
        ("v_proj", values, key_cut, None),
    ):
        yield from _product(
            f"{source}{'qkv_proj' if is_fused else key}",
            (queries + 2 * keys if is_fused else num_rows, hidden),
            f"{target}qkv",
            cut,
            row_order,
            rows=Cut(0, first_row, num_rows) if is_fused else None,
            has_bias=config.has_qkv_bias,
        )
        first_row += num_rows
    yield from _product(
        f"{source}o_proj",
        (hidden, attended),
        f"{target}output",
        output_cut,
        has_bias=config.has_output_bias,
    )


def _query_gate_order(num_heads: int, dim: int, order: tuple[int, ...] | None) -> tuple[int, ...]:
    """Returns the order of rows that puts all queries before all gates; in a checkpoint each head's
    gates follow its query."""
    firsts = [2 * dim * head for head in range(num_heads)]
    queries = [first + row for first in firsts for row in order or range(dim)]
    return (*queries, *(first + row for first in firsts for row in range(dim, 2 * dim)))


def _mlp_parts(config: ModelConfig, source: str, target: str, shard: Shard) -> Iterator[WeightPart]:
    hidden, wide, has_bias = config.hidden_size, config.intermediate_size, config.has_mlp_bias
    cut, down_cut = shard.cut(0, wide), shard.cut(1, wide)
    for index, key in enumerate(("gate_proj", "up_proj")):
        name, rows, whole = key, None, (wide, hidden)
        if config.family.has_fused_matrices:
            name, rows, whole = "gate_up_proj", Cut(0, index * wide, wide), (2 * wide, hidden)
        yield from _product(
            f"{source}{name}", whole, f"{target}gate_up", cut, rows=rows, has_bias=has_bias
        )
    down = f"{source}down_proj"
    yield from _product(down, (hidden, wide), f"{target}down", down_cut, has_bias=has_bias)
