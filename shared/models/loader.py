"""Loads a decoder from a Hugging Face folder to its device."""

from __future__ import annotations

import enum
import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from shared.kernels.linear import WORD_BLOCK, is_hopper
from shared.kernels.quantised import StoredMatrix
from shared.layers.attention import Attention, AttentionShape, NarrowHeads, SelfAttention
from shared.layers.decoder_layer import DecoderLayer, Mlp
from shared.layers.linear import Linear
from shared.layers.norm import RmsNorm
from shared.layers.rotary import Rotary
from shared.layers.tensor_group import TensorGroup
from shared.model_options import ModelOptions, Quantisation
from shared.models.checkpoint import Checkpoint
from shared.models.config import ModelConfig
from shared.models.decoder import Decoder, attention_shape
from shared.models.decoder_weights import (
    IGNORED_SUFFIXES,
    DecoderKeys,
    LayerTensors,
    build_delta,
    build_experts,
    build_latent,
    decoder_parts,
    keys_of_others,
    norm_from,
)
from shared.models.families import NormPlacement
from shared.models.shard import Shard, shard_of
from shared.models.weights import (
    FULL_PACE,
    CopyPace,
    Stays,
    WeightTensors,
    read_weights,
    stays_stored,
)
from shared.telemetry.start_up import start_phase
from shared.vocabulary_map import VocabularyMap

# Prefixes of the other tensors of next-token layers, which all these layers share.
MTP_PREFIXES = ("model.mtp.", "mtp.")


class MtpStyle(enum.Enum):
    """Key prefixes of next-token layers; MIMO's order of inputs differs, see `MtpLayer`."""

    DEEPSEEK = "model.layers."
    MIMO = "model.mtp_layers."
    MIMO_V2 = "model.mtp.layers."
    QWEN = "mtp.layers."


# In a DeepSeek-style folder next-token layers are numbered on from the decoder's layers, so only
# tensors that no decoder layer has identify them.
_KEYS = {
    MtpStyle.DEEPSEEK: re.compile(
        r"((?:model|model\.language_model|language_model\.model)\.layers\.)(\d+)\."
        r"(?:transformer\.)?(?:eh_proj|enorm|hnorm|shared_head)\."
    ),
    MtpStyle.MIMO: re.compile(r"(model\.mtp_layers\.)(\d+)\."),
    MtpStyle.MIMO_V2: re.compile(r"(model\.mtp\.layers\.)(\d+)\."),
    MtpStyle.QWEN: re.compile(r"(mtp\.layers\.)(\d+)\."),
}


@dataclass(frozen=True, slots=True)
class MtpLayers:
    """The next-token layers of one checkpoint.

    Attributes:
        style: None when there are no layers.
        prefixes: key prefix of each layer, in order.
    """

    style: MtpStyle | None
    prefixes: tuple[str, ...]


def find_mtp_layers(keys: Collection[str]) -> MtpLayers:
    """Returns the next-token layers among the keys of a checkpoint."""
    for style, pattern in _KEYS.items():
        layers = {(int(match[2]), match[1]) for match in map(pattern.match, keys) if match}
        if layers:
            return MtpLayers(style, tuple(f"{root}{number}." for number, root in sorted(layers)))
    return MtpLayers(None, ())


def load_decoder(
    folder: Path,
    *,
    dtype: torch.dtype,
    device: torch.device,
    options: ModelOptions = ModelOptions(),  # noqa: B008 - frozen
    pace: CopyPace = FULL_PACE,
    show_progress: bool = False,
    group: TensorGroup | None = None,
    vocabulary: VocabularyMap | None = None,
    vocab_size: int = 0,
) -> Decoder:
    """Reads config and weights to `device`, cast to `dtype`.

    Args:
        options: quantisation does not apply to the embedding, which is a table of rows. Matrices
            that the checkpoint has in 8 bits stay in them, see `stays_stored`.
        group: processes that share the model; each reads its part, see `Shard`.
        vocabulary: maps this model's tokens to the ids of another, which it then uses; else None.
        vocab_size: number of ids of that model, or of one with the same tokenizer; 0 keeps the
            checkpoint's, and so does a group without `vocabulary`.

    Raises:
        CheckpointError: if the folder is incomplete, damaged or of another architecture; the
            message names the file, the key and, for a wrong shape, both shapes.
    """
    config = ModelConfig.from_folder(folder)
    checkpoint = Checkpoint.open(folder, options.load_format)
    with start_phase("weights") as phase:
        tensors = read_decoder(
            checkpoint,
            config,
            shard_of(group),
            dtype=dtype,
            device=device,
            stays=stays_stored(options.quantisation, dtype, device),
            pace=pace,
            show_progress=show_progress,
        )
        phase.size_bytes = sum(tensor.nbytes for tensor in tensors.values())
    if vocabulary is not None:
        config = in_other_vocabulary(
            tensors, config, vocabulary, vocab_size=vocab_size, group=group
        )
    elif group is None and vocab_size not in (0, config.vocab_size):
        config = with_ids(tensors, config, vocab_size)
    with start_phase("layers"):
        return build_decoder(config, tensors, device, options, group)


def read_decoder(
    checkpoint: Checkpoint,
    config: ModelConfig,
    shard: Shard,
    *,
    dtype: torch.dtype,
    device: torch.device,
    stays: Stays | None = None,
    pace: CopyPace = FULL_PACE,
    is_pinned: bool = False,
    show_progress: bool = False,
) -> WeightTensors:
    """Reads the tensors of `decoder_parts` to `device`, cast to `dtype`; see `read_weights`.

    Raises:
        CheckpointError: see `load_decoder`.
    """
    keys = DecoderKeys.of(checkpoint.files)
    tied_copy = (keys.lm_head,) if config.tie_word_embeddings else ()
    return read_weights(
        checkpoint,
        decoder_parts(config, shard, keys),
        # Next-token layers are read by drafters only.
        ignored_prefixes=(
            *MTP_PREFIXES,
            *find_mtp_layers(checkpoint.files).prefixes,
            *keys.ignored_prefixes,
            *tied_copy,
        ),
        ignored_suffixes=IGNORED_SUFFIXES,
        ignored_keys=keys_of_others(config, shard, keys),
        dtype=dtype,
        device=device,
        stays=stays,
        pace=pace,
        is_pinned=is_pinned,
        show_progress=show_progress,
    )


def build_decoder(
    config: ModelConfig,
    tensors: WeightTensors,
    device: torch.device,
    options: ModelOptions,
    group: TensorGroup | None = None,
) -> Decoder:
    """Returns the decoder of `tensors`, which are named by `decoder_parts`.

    Removes each tensor from the dict when it is used, so that packed weights are not held twice.
    """
    embedding = tensors.pop("embedding")
    head = embedding if config.tie_word_embeddings else tensors.pop("lm_head")
    lm_head = Linear.of(head, None, options.lm_head_quantisation)
    del head
    layers = tuple(
        build_layer(
            config,
            tensors,
            attention_shape(config, layer, shard_of(group)),
            layer,
            options.quantisation,
            group,
        )
        for layer in shard_of(group).layers(config)
    )
    decoder = Decoder(
        config=config,
        embedding=embedding,
        layers=layers,
        norm=norm_from(config, tensors, "norm"),
        lm_head=replace(lm_head, cap=config.logit_cap),
        rotary=Rotary(config.rope, config.rotary_dim, device),
        attention_backend=options.attention_backend,
        group=group,
        sliding_rotary=None
        if config.sliding_rope is None
        else Rotary(config.sliding_rope, config.head_dim, device),
        token_map=tensors.pop("token_map", None),
        layouts=tensors.layouts,
    )
    assert not tensors, f"weights were read but not used: {sorted(tensors)}"
    return decoder


def build_layer(
    config: ModelConfig,
    tensors: WeightTensors,
    shape: AttentionShape,
    layer: int,
    quantisation: Quantisation = Quantisation.UNQUANT,
    group: TensorGroup | None = None,
) -> DecoderLayer:
    """Builds a layer; removes its tensors, `layers.{layer}.` of `layer_parts`, from the dict.

    Args:
        group: group of the whole model; see `build_decoder`.
    """
    weights = LayerTensors(config, tensors, layer, quantisation, group)
    has_input_norm = config.family.norms is not NormPlacement.AFTER
    has_output_norm = config.family.norms is not NormPlacement.BEFORE
    build: Callable[[LayerTensors, AttentionShape], SelfAttention] = build_attention
    if config.has_state(layer):
        build = build_delta
    elif config.latent is not None:
        build = build_latent
    return DecoderLayer(
        attention_norm=weights.norm("attention_norm") if has_input_norm else None,
        attention=build(weights, shape),
        mlp_norm=weights.norm("mlp_norm") if has_input_norm else None,
        mlp=build_experts(weights) if weights.has("router.weight") else _gated_block(weights),
        attention_output_norm=weights.norm("attention_output_norm") if has_output_norm else None,
        mlp_output_norm=weights.norm("mlp_output_norm") if has_output_norm else None,
    )


def _gated_block(weights: LayerTensors) -> Mlp:
    gate_up, down = (
        weights.tensors.pop_matrix(f"{weights.prefix}{name}.weight") for name in ("gate_up", "down")
    )
    bias, down_bias = weights.pop_if_any("gate_up.bias"), weights.pop_if_any("down.bias")
    # In a weight update, one of the two may be on the meta device.
    rest = -down.shape[1] % WORD_BLOCK
    if rest and (is_hopper(gate_up.device) or is_hopper(down.device)):
        gate_up, bias, down = _padded(gate_up, bias, down, rest)
    return Mlp(
        Linear.of(gate_up, bias, weights.quantisation),
        Linear.of(down, down_bias, weights.quantisation, weights.own_group),
        weights.config.activation,
        weights.config.layer_limits(weights.layer)[0],
    )


def _padded(
    gate_up: Tensor | StoredMatrix, bias: Tensor | None, down: Tensor | StoredMatrix, rest: int
) -> tuple[Tensor | StoredMatrix, Tensor | None, Tensor | StoredMatrix]:
    """Returns the weights of a gated block with `rest` more channels of zeros, which add nothing to
    the result. The second product is batch-invariant, and computed in 8 bits with 8-bit weights,
    only if its depth is a multiple of 128."""
    if bias is not None:
        bias = _pad_rows(bias, 2, rest)
    if isinstance(gate_up, StoredMatrix):
        # If a half is not a multiple of a block, each row has its own scales.
        values, scales = _pad_rows(gate_up.values, 2, rest), _pad_rows(gate_up.scales, 2, rest)
        gate_up = replace(gate_up, values=values, scales=scales)
    else:
        gate_up = _pad_rows(gate_up, 2, rest)
    if isinstance(down, StoredMatrix):
        # The zeros are in the last block of columns, or use the scale of their row.
        return gate_up, bias, replace(down, values=_pad_columns(down.values, rest))
    return gate_up, bias, _pad_columns(down, rest)


def _pad_rows(rows: Tensor, num_parts: int, rest: int) -> Tensor:
    """Returns the rows as `num_parts` equal parts, each followed by `rest` rows of zeros."""
    parts = rows.view(num_parts, -1, *rows.shape[1:])
    padded = parts.new_zeros(num_parts, parts.shape[1] + rest, *rows.shape[1:])
    padded[:, : parts.shape[1]] = parts
    return padded.flatten(0, 1)


def _pad_columns(rows: Tensor, rest: int) -> Tensor:
    """Returns the rows, each followed by `rest` zeros."""
    padded = rows.new_zeros(len(rows), rows.shape[1] + rest)
    padded[:, : rows.shape[1]] = rows
    return padded


def build_attention(weights: LayerTensors, shape: AttentionShape) -> Attention:
    """Builds one attention; removes its tensors from the dict."""
    config, qk_norm, joint_norms, narrow = weights.config, None, None, None
    gate = weights.pop_if_any("head_gate.weight")
    if (hybrid := config.hybrid) is not None:
        num_kv_heads = config.layer_kv_heads(weights.layer)
        narrow = NarrowHeads(num_kv_heads, hybrid.value_dim, hybrid.value_scale)
    if config.has_qk_norm:
        weight = weights.norm("qk_norm").weight
        qk_norm = RmsNorm(weight.view(-1, config.head_dim), config.rms_norm_eps)
    if config.has_unit_norm and weights.layer not in config.unrotated_layers:
        # The norms may precede the rotation, since that does not change the length of a head.
        size = shape.num_heads + shape.num_kv_heads, config.head_dim
        qkv = weights.tensors[f"{weights.prefix}qkv.weight"]
        qk_norm = RmsNorm(qkv.new_ones(size, dtype=weights.tensors.dtype), config.rms_norm_eps)
    if config.norms_all_heads:
        joint_norms = weights.norm("query_norm"), weights.norm("key_norm")
    return Attention(
        shape=shape,
        qkv=weights.linear("qkv"),
        output=weights.linear("output", weights.own_group),
        qk_norm=qk_norm,
        layer=weights.cache_layer,
        joint_norms=joint_norms,
        sinks=weights.pop_if_any("sinks"),
        narrow=narrow,
        head_gate=Linear.of(gate) if gate is not None else None,
        is_gated=config.family.is_gated,
    )


# A language model in the token ids of another model: embedding and lm_head are rebuilt on load.
#
# Everything outside the draft model keeps the target's ids. The embedding becomes a table with a
# row for each of the target's tokens. The lm_head keeps the rows of the tokens that both models
# have, as in a head with a vocabulary of its own. The noise of the coupled rule is keyed by the
# target's ids, so the draft agrees with the target as often as a draft of the target's family that
# can only propose these tokens.


def in_other_vocabulary(
    tensors: dict[str, Tensor],
    config: ModelConfig,
    vocabulary: VocabularyMap,
    *,
    vocab_size: int = 0,
    group: TensorGroup | None = None,
) -> ModelConfig:
    """Replaces `embedding` and `lm_head`, which are no longer tied, and adds `token_map`.

    Args:
        tensors: named by `decoder_parts`.
        vocab_size: least number of rows of the embedding; a target may have more ids than its
            tokenizer has tokens.
        group: processes that share the model; all of them call this at the same time.

    Returns:
        The config with the target's vocabulary.
    """
    size, rank = (1, 0) if group is None else (group.size, group.rank)
    vocabulary = vocabulary.within(config.vocab_size)
    embedding = tensors.pop("embedding")
    lm_head = embedding if config.tie_word_embeddings else tensors.pop("lm_head")
    if group is not None:
        embedding, lm_head = group.stacked(embedding), group.stacked(lm_head)
    # All processes have parts of equal size: the embedding is filled up with ids that have no
    # token, and the lm_head leaves out the last tokens, which are rare.
    num_rows = -(-max(vocab_size, len(vocabulary.pieces)) // size)
    num_shared = len(vocabulary.target_ids) // size
    pieces = vocabulary.pieces[rank * num_rows : (rank + 1) * num_rows]
    tensors["embedding"] = _embedding_of_pieces(embedding, pieces, num_rows)
    rows = vocabulary.draft_ids[rank * num_shared : (rank + 1) * num_shared]
    tensors["lm_head"] = lm_head.index_select(0, _ids(rows, lm_head.device))
    tensors["token_map"] = _ids(vocabulary.target_ids[: num_shared * size], lm_head.device)
    return replace(config, vocab_size=num_rows * size, tie_word_embeddings=False)


def with_ids(tensors: dict[str, Tensor], config: ModelConfig, vocab_size: int) -> ModelConfig:
    """Changes a model's number of ids to that of another model with the same tokenizer: models of
    one family pad their tables to different sizes. New ids have an embedding of zeros and are never
    proposed.

    Arguments and result are those of `in_other_vocabulary`.
    """
    num_kept = min(config.vocab_size, vocab_size)
    table, lm_head = tensors["embedding"], tensors.get("lm_head")
    if vocab_size > num_kept:
        table = table.new_zeros(vocab_size, table.shape[1])
        table[:num_kept] = tensors["embedding"]
        tensors["token_map"] = torch.arange(num_kept, device=table.device)
    tensors["embedding"] = table[:vocab_size]
    tensors["lm_head"] = (table if lm_head is None else lm_head)[:num_kept]
    return replace(config, vocab_size=vocab_size, tie_word_embeddings=False)


def _embedding_of_pieces(
    embedding: Tensor, pieces: Sequence[tuple[int, ...]], num_rows: int
) -> Tensor:
    """Returns `[num_rows, H]`: for each of the target's tokens the row of its last draft token.

    A token is one position for both models, so one row must stand for all draft tokens that spell
    it. It is that of the last one, after which the draft expects the next token. The mean of their
    rows drafts as well if a third or half of the demo target's tokens have no draft token, and less
    well if a sixth have none.
    """
    table = embedding.new_zeros(num_rows, embedding.shape[1])
    spelled = [token for token, piece in enumerate(pieces) if piece]
    last = _ids([pieces[token][-1] for token in spelled], embedding.device)
    return table.index_copy_(0, _ids(spelled, embedding.device), embedding.index_select(0, last))


def _ids(values: Sequence[int], device: torch.device) -> Tensor:
    return torch.tensor(values, dtype=torch.int64, device=device)
