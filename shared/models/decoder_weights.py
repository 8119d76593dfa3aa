"""The name map of Llama-shaped checkpoints."""

from __future__ import annotations

from collections.abc import Iterator

from shared.models.checkpoint import Cut
from shared.models.config import ModelConfig
from shared.models.shard import WHOLE, Shard
from shared.models.weights import WeightPart

# Buffers that some checkpoints carry beside their weights.
IGNORED_SUFFIXES = (".rotary_emb.inv_freq", ".masked_bias", ".attn.bias")
LM_HEAD_KEY = "lm_head.weight"


def decoder_parts(config: ModelConfig, shard: Shard = WHOLE) -> tuple[WeightPart, ...]:
    """Lists every tensor of the decoder, in the order in which fused ones are stacked."""
    hidden = config.hidden_size
    table, rows = (config.vocab_size, hidden), _vocabulary_cut(config, shard)
    parts = [WeightPart("model.embed_tokens.weight", table, "embedding", cut=rows)]
    for layer in range(config.num_layers):
        parts.extend(layer_parts(config, f"model.layers.{layer}.", f"layers.{layer}.", shard))
    parts.append(WeightPart("model.norm.weight", (hidden,), "norm"))
    if not config.tie_word_embeddings:
        parts.append(WeightPart(LM_HEAD_KEY, table, "lm_head", cut=rows))
    return tuple(parts)


def layer_parts(
    config: ModelConfig, source: str, target: str, shard: Shard = WHOLE
) -> Iterator[WeightPart]:
    """Yields the tensors of one layer, from keys that begin with `source` to names that begin with
    `target`.

    A shard cuts what its process computes alone: heads and channels of the feed-forward block.
    Their products with the stream are cut by outputs, those back to the stream by inputs; a bias
    of the latter is added after the sum over processes and stays whole.
    """
    hidden, cuts = config.hidden_size, _cuts(config, shard)
    yield WeightPart(f"{source}input_layernorm.weight", (hidden,), f"{target}attention_norm")
    yield WeightPart(f"{source}post_attention_layernorm.weight", (hidden,), f"{target}mlp_norm")
    for key, shape, name, has_bias in _products(config):
        cut = cuts.get(key)
        yield WeightPart(f"{source}{key}.weight", shape, f"{target}{name}.weight", cut=cut)
        if has_bias:
            bias_cut = cut if cut is not None and cut.dim == 0 else None
            yield WeightPart(f"{source}{key}.bias", shape[:1], f"{target}{name}.bias", cut=bias_cut)
    if config.has_qk_norm:
        num_heads, num_kv_heads = shard.num_heads(config), shard.num_kv_heads(config)
        for key, repeats in (("q_norm", num_heads), ("k_norm", num_kv_heads)):
            yield WeightPart(
                f"{source}self_attn.{key}.weight",
                (config.head_dim,),
                f"{target}qk_norm",
                repeats,
            )


def _cuts(config: ModelConfig, shard: Shard) -> dict[str, Cut]:
    """Returns the part of each matrix of a layer that the shard holds; none when it holds all."""
    if shard.size == 1:
        return {}
    dim, rank = config.head_dim, shard.rank
    queries = shard.num_heads(config) * dim
    keys = Cut(0, shard.first_kv_head(config) * dim, shard.num_kv_heads(config) * dim)
    wide = config.intermediate_size // shard.size
    return {
        "self_attn.q_proj": Cut(0, rank * queries, queries),
        "self_attn.k_proj": keys,
        "self_attn.v_proj": keys,
        "self_attn.o_proj": Cut(1, rank * queries, queries),
        "mlp.gate_proj": Cut(0, rank * wide, wide),
        "mlp.up_proj": Cut(0, rank * wide, wide),
        "mlp.down_proj": Cut(1, rank * wide, wide),
    }


def _vocabulary_cut(config: ModelConfig, shard: Shard) -> Cut | None:
    tokens = shard.vocabulary(config)
    return None if shard.size == 1 else Cut(0, tokens.start, len(tokens))


def _products(config: ModelConfig) -> tuple[tuple[str, tuple[int, ...], str, bool], ...]:
    """Returns key, shape, fused name and presence of a bias of each matrix of a layer."""
    hidden, wide = config.hidden_size, config.intermediate_size
    queries = config.num_heads * config.head_dim
    keys = config.num_kv_heads * config.head_dim
    qkv_bias, mlp_bias = config.has_qkv_bias, config.has_mlp_bias
    return (
        ("self_attn.q_proj", (queries, hidden), "qkv", qkv_bias),
        ("self_attn.k_proj", (keys, hidden), "qkv", qkv_bias),
        ("self_attn.v_proj", (keys, hidden), "qkv", qkv_bias),
        ("self_attn.o_proj", (hidden, queries), "output", config.has_output_bias),
        ("mlp.gate_proj", (wide, hidden), "gate_up", mlp_bias),
        ("mlp.up_proj", (wide, hidden), "gate_up", mlp_bias),
        ("mlp.down_proj", (hidden, wide), "down", mlp_bias),
    )
