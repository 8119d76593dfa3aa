"""The name maps of decoder checkpoints."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass

from shared.models.checkpoint import Cut
from shared.models.config import ModelConfig
from shared.models.delta_weights import delta_parts
from shared.models.expert_weights import expert_parts
from shared.models.families import NormPlacement
from shared.models.latent_weights import latent_parts
from shared.models.shard import WHOLE, Shard
from shared.models.weights import WeightPart

# Buffers that some checkpoints carry beside their weights.
IGNORED_SUFFIXES = (".rotary_emb.inv_freq", ".masked_bias", ".attn.bias")
LM_HEAD_KEY = "lm_head.weight"
_EMBEDDING = "embed_tokens.weight"
_PLAIN_ROOT = "model."
# Where checkpoints with a picture model beside it keep the text model, and what else they hold.
_ROOTS = (_PLAIN_ROOT, "model.language_model.", "language_model.model.")
_PICTURE_PREFIXES = (
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
        root: what the keys of embedding, layers and norm begin with.
        lm_head: the key of the lm_head.
        ignored_prefixes: what the keys of other models in the folder begin with.
        has_stacks: experts are one tensor a layer, where a family's checkpoints have both ways.
    """

    root: str = _PLAIN_ROOT
    lm_head: str = LM_HEAD_KEY
    ignored_prefixes: tuple[str, ...] = ()
    has_stacks: bool = False

    @classmethod
    def of(cls, keys: Collection[str]) -> DecoderKeys:
        """Finds the decoder among the keys of a checkpoint."""
        root = next((each for each in _ROOTS if f"{each}{_EMBEDDING}" in keys), _PLAIN_ROOT)
        has_stacks = any(key.endswith(_STACK) for key in keys)
        if root == _PLAIN_ROOT:
            has_pictures = any(key.startswith(_PICTURE_PREFIXES) for key in keys)
            ignored = _PICTURE_PREFIXES if has_pictures else ()
            return cls(ignored_prefixes=ignored, has_stacks=has_stacks)
        nested = f"language_model.{LM_HEAD_KEY}"
        lm_head = nested if nested in keys else LM_HEAD_KEY
        return cls(root, lm_head, _PICTURE_PREFIXES, has_stacks)

    @property
    def embedding(self) -> str:
        return f"{self.root}{_EMBEDDING}"


@dataclass(frozen=True, slots=True)
class _Matrix:
    """A matrix of a layer.

    Attributes:
        key: name in the checkpoint, without `.weight`.
        shape: of the whole tensor in the checkpoint.
        first_row: where the matrix begins in it; others may stand before and after.
        num_rows: of the matrix.
        name: of the tensor it becomes part of.
        cut: the part of the matrix that the shard holds; None holds all.
        row_order: see `WeightPart`.
    """

    key: str
    shape: tuple[int, int]
    first_row: int
    num_rows: int
    name: str
    has_bias: bool
    cut: Cut | None
    row_order: tuple[int, ...] | None = None

    def parts(self, source: str, target: str) -> Iterator[WeightPart]:
        cut, rows = self.cut, Cut(0, self.first_row, self.num_rows)
        if cut is not None and cut.dim == 0:
            rows = Cut(0, self.first_row + cut.start, cut.length)
        is_whole = rows == Cut(0, 0, self.shape[0])
        bias_cut = None if is_whole else rows
        weight_cut = cut if cut is not None and cut.dim == 1 else bias_cut
        key, name = f"{source}{self.key}", f"{target}{self.name}"
        yield WeightPart(
            f"{key}.weight", self.shape, f"{name}.weight", 1, weight_cut, self.row_order
        )
        if self.has_bias:
            yield WeightPart(
                f"{key}.bias", self.shape[:1], f"{name}.bias", 1, bias_cut, self.row_order
            )


def decoder_parts(
    config: ModelConfig,
    shard: Shard = WHOLE,
    keys: DecoderKeys = DecoderKeys(),
) -> tuple[WeightPart, ...]:
    """Lists every tensor of the decoder, in the order in which fused ones are stacked."""
    hidden = config.hidden_size
    table, rows = (config.vocab_size, hidden), _vocabulary_cut(config, shard)
    parts = [WeightPart(keys.embedding, table, "embedding", cut=rows)]
    for layer in range(config.num_layers):
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
    """Returns the keys of tensors of which nothing is here: experts of other processes."""
    if not shard.spreads_experts:
        return frozenset()
    own = {part.key for part in decoder_parts(config, shard, keys)}
    return frozenset(part.key for part in decoder_parts(config, WHOLE, keys)) - own


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
    """Yields the tensors of one layer, from keys that begin with `source` to names that begin with
    `target`.

    A shard cuts what its process computes alone: heads and channels of the feed-forward block.
    Their products with the stream are cut by outputs, those back to the stream by inputs; a bias
    of the latter is added after the sum over processes and stays whole.
    """
    for key, name in _NORMS[config.norms].items():
        yield WeightPart(f"{source}{key}.weight", (config.hidden_size,), f"{target}{name}")
    if config.has_state(layer):
        yield from delta_parts(config, source, target)
    elif config.latent is None:
        for matrix in _attention_matrices(config, shard, layer):
            yield from matrix.parts(source, target)
    else:
        yield from latent_parts(config, source, target, shard)
    if has_experts:
        assert config.experts is not None
        yield from expert_parts(
            config.experts, config.hidden_size, source, target, shard, has_stacks=has_stacks
        )
    else:
        for matrix in _mlp_matrices(config, shard):
            yield from matrix.parts(source, target)
    if not config.has_state(layer):
        yield from _head_norms(config, source, target, shard, layer)
    if config.has_head_gates:
        gates = (config.layer_heads(layer), config.hidden_size)
        yield WeightPart(f"{source}self_attn.g_proj.weight", gates, f"{target}head_gate.weight")
    if config.layer_has_sinks(layer):
        own = shard.num_heads(config)
        cut = None if shard.size == 1 else Cut(0, shard.rank * own, own)
        yield WeightPart(
            f"{source}self_attn.{config.sinks_key}", (config.num_heads,), f"{target}sinks", cut=cut
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


def _attention_matrices(config: ModelConfig, shard: Shard, layer: int) -> Iterator[_Matrix]:
    hidden, dim = config.hidden_size, config.head_dim
    value_dim = dim if config.hybrid is None else config.hybrid.value_dim
    num_kv_heads = config.layer_kv_heads(layer)
    num_heads = config.layer_heads(layer)
    queries, keys = num_heads * dim, num_kv_heads * dim
    values, attended = num_kv_heads * value_dim, num_heads * value_dim
    order = config.layer_rope(layer).dim_order(dim)
    query_order, gates = order, 0
    if config.is_gated:
        query_order, gates = _before_gates(num_heads, dim, order), queries
    query_cut = key_cut = output_cut = None
    if shard.size > 1:
        own = shard.num_heads(config) * dim
        query_cut, output_cut = Cut(0, shard.rank * own, own), Cut(1, shard.rank * own, own)
        key_cut = Cut(0, shard.first_kv_head(config) * dim, shard.num_kv_heads(config) * dim)
    first_row = 0
    for key, rows, cut, row_order in (
        ("q_proj", queries + gates, query_cut, query_order),
        ("k_proj", keys, key_cut, order),
        ("v_proj", values, key_cut, None),
    ):
        whole = (queries + 2 * keys if config.has_fused_matrices else rows, hidden)
        name = "qkv_proj" if config.has_fused_matrices else key
        yield _Matrix(
            f"self_attn.{name}", whole, first_row, rows, "qkv", config.has_qkv_bias, cut, row_order
        )
        first_row += rows if config.has_fused_matrices else 0
    yield _Matrix(
        "self_attn.o_proj",
        (hidden, attended),
        0,
        hidden,
        "output",
        config.has_output_bias,
        output_cut,
    )


def _before_gates(num_heads: int, dim: int, order: tuple[int, ...] | None) -> tuple[int, ...]:
    """Returns the rows of all queries and then of all gates, which a checkpoint has by heads."""
    firsts = [2 * dim * head for head in range(num_heads)]
    queries = [first + place for first in firsts for place in order or range(dim)]
    return (*queries, *(first + place for first in firsts for place in range(dim, 2 * dim)))


def _mlp_matrices(config: ModelConfig, shard: Shard) -> Iterator[_Matrix]:
    hidden, wide, has_bias = config.hidden_size, config.intermediate_size, config.has_mlp_bias
    is_fused, own = config.has_fused_matrices, wide // shard.size
    block, cut, down_cut = config.mlp_block, None, None
    if shard.size > 1:
        cut, down_cut = Cut(0, shard.rank * own, own), Cut(1, shard.rank * own, own)
    for index, key in enumerate(("gate_proj", "up_proj")):
        whole = (2 * wide if is_fused else wide, hidden)
        name, first_row = ("gate_up_proj", index * wide) if is_fused else (key, 0)
        yield _Matrix(f"{block}{name}", whole, first_row, wide, "gate_up", has_bias, cut)
    yield _Matrix(
        f"{config.mlp_block}down_proj", (hidden, wide), 0, hidden, "down", has_bias, down_cut
    )


def _vocabulary_cut(config: ModelConfig, shard: Shard) -> Cut | None:
    tokens = shard.vocabulary(config)
    return None if shard.size == 1 else Cut(0, tokens.start, len(tokens))
