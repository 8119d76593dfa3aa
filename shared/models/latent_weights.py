"""The name map of latent attention, and the layer of its tensors."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from shared.layers.attention import AttentionShape
from shared.layers.latent_attention import LatentAttention
from shared.layers.linear import Linear
from shared.layers.norm import RmsNorm
from shared.layers.tensor_group import TensorGroup
from shared.model_options import Quantisation
from shared.models.checkpoint import Cut
from shared.models.config import LatentConfig, ModelConfig
from shared.models.shard import Shard
from shared.models.weights import WeightPart


def latent_parts(
    config: ModelConfig, source: str, target: str, shard: Shard
) -> Iterator[WeightPart]:
    """Yields the tensors of one layer's attention, see `decoder_weights.layer_parts`.

    A shard cuts the heads; the latent vector is every process's own.
    """
    latent, hidden = config.latent, config.hidden_size
    assert latent is not None
    source = f"{source}self_attn."
    by_head, row_order = _orders(config, latent)
    heads = config.num_heads * latent.query_dim
    cut = _head_cut(config, latent.query_dim, 0, shard)
    has_bias = config.has_qkv_bias
    if latent.query_rank is None:
        yield WeightPart(
            f"{source}q_proj.weight", (heads, hidden), f"{target}compress.weight", 1, cut, by_head
        )
        has_bias = False
    else:
        rank = latent.query_rank
        yield WeightPart(f"{source}q_a_proj.weight", (rank, hidden), f"{target}compress.weight")
        if has_bias:
            yield WeightPart(f"{source}q_a_proj.bias", (rank,), f"{target}compress.bias")
        yield WeightPart(f"{source}q_a_layernorm.weight", (rank,), f"{target}query_norm")
        yield WeightPart(
            f"{source}q_b_proj.weight", (heads, rank), f"{target}queries.weight", 1, cut, by_head
        )
    key = f"{source}kv_a_proj_with_mqa"
    shape, name = (latent.row_dim, hidden), f"{target}compress"
    yield WeightPart(f"{key}.weight", shape, f"{name}.weight", row_order=row_order)
    if has_bias:
        yield WeightPart(f"{key}.bias", shape[:1], f"{name}.bias", row_order=row_order)
    yield WeightPart(f"{source}kv_a_layernorm.weight", (latent.latent_dim,), f"{target}latent_norm")
    expanded = latent.straight_dim + latent.value_dim
    yield WeightPart(
        f"{source}kv_b_proj.weight",
        (config.num_heads * expanded, latent.latent_dim),
        f"{target}expand",
        cut=_head_cut(config, expanded, 0, shard),
    )
    yield WeightPart(
        f"{source}o_proj.weight",
        (hidden, config.num_heads * latent.value_dim),
        f"{target}output.weight",
        cut=_head_cut(config, latent.value_dim, 1, shard),
    )
    if config.has_output_bias:
        yield WeightPart(f"{source}o_proj.bias", (hidden,), f"{target}output.bias")


def build_latent(
    config: ModelConfig,
    tensors: dict[str, Tensor],
    shape: AttentionShape,
    layer: int,
    quantisation: Quantisation,
    group: TensorGroup | None,
) -> LatentAttention:
    """Takes the tensors of one layer's attention out of the dict."""
    latent, prefix, eps = config.latent, f"layers.{layer}.", config.rms_norm_eps
    assert latent is not None

    def linear(name: str, own_group: TensorGroup | None = None) -> Linear:
        bias = tensors.pop(f"{prefix}{name}.bias", None)
        return Linear.of(tensors.pop(f"{prefix}{name}.weight"), bias, quantisation, own_group)

    is_short = latent.query_rank is None
    expand = tensors.pop(f"{prefix}expand").view(shape.num_heads, -1, latent.latent_dim)
    return LatentAttention(
        shape=shape,
        compress=linear("compress"),
        query_norm=None if is_short else RmsNorm(tensors.pop(f"{prefix}query_norm"), eps),
        queries=None if is_short else linear("queries"),
        latent_norm=RmsNorm(tensors.pop(f"{prefix}latent_norm"), eps),
        key_up=expand[:, : latent.straight_dim].contiguous(),
        value_up=expand[:, latent.straight_dim :].contiguous(),
        output=linear("output", group),
        layer=layer,
    )


def _orders(
    config: ModelConfig, latent: LatentConfig
) -> tuple[tuple[int, ...] | None, tuple[int, ...] | None]:
    """Returns the order of a query head's rows, and of those that make a row of the cache."""
    order = config.rope.dim_order(latent.rotary_dim)
    if order is None:
        return None, None

    def behind(count: int) -> tuple[int, ...]:
        return (*range(count), *(count + index for index in order))

    return behind(latent.straight_dim), behind(latent.latent_dim)


def _head_cut(config: ModelConfig, dim: int, axis: int, shard: Shard) -> Cut | None:
    if shard.size == 1:
        return None
    own = shard.num_heads(config) * dim
    return Cut(axis, shard.rank * own, own)
