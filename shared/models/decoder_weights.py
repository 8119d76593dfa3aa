"""The name map of Llama-shaped checkpoints."""

from __future__ import annotations

from collections.abc import Iterator

from shared.models.config import ModelConfig
from shared.models.weights import WeightPart

# Buffers that some checkpoints carry beside their weights.
IGNORED_SUFFIXES = (".rotary_emb.inv_freq", ".masked_bias", ".attn.bias")
LM_HEAD_KEY = "lm_head.weight"


def decoder_parts(config: ModelConfig) -> tuple[WeightPart, ...]:
    """Lists every tensor of the decoder, in the order in which fused ones are stacked."""
    hidden, vocab = config.hidden_size, config.vocab_size
    parts = [WeightPart("model.embed_tokens.weight", (vocab, hidden), "embedding")]
    for layer in range(config.num_layers):
        parts.extend(layer_parts(config, f"model.layers.{layer}.", f"layers.{layer}."))
    parts.append(WeightPart("model.norm.weight", (hidden,), "norm"))
    if not config.tie_word_embeddings:
        parts.append(WeightPart(LM_HEAD_KEY, (vocab, hidden), "lm_head"))
    return tuple(parts)


def layer_parts(config: ModelConfig, source: str, target: str) -> Iterator[WeightPart]:
    """Yields the tensors of one layer, from keys that begin with `source` to names that begin with
    `target`."""
    hidden = config.hidden_size
    yield WeightPart(f"{source}input_layernorm.weight", (hidden,), f"{target}attention_norm")
    yield WeightPart(f"{source}post_attention_layernorm.weight", (hidden,), f"{target}mlp_norm")
    for key, shape, name, has_bias in _products(config):
        yield WeightPart(f"{source}{key}.weight", shape, f"{target}{name}.weight")
        if has_bias:
            yield WeightPart(f"{source}{key}.bias", shape[:1], f"{target}{name}.bias")
    if config.has_qk_norm:
        for key, repeats in (("q_norm", config.num_heads), ("k_norm", config.num_kv_heads)):
            yield WeightPart(
                f"{source}self_attn.{key}.weight",
                (config.head_dim,),
                f"{target}qk_norm",
                repeats,
            )


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
