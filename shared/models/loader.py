"""From a Hugging Face folder to a decoder on its device."""

from __future__ import annotations

import enum
import re
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from shared.kernels.linear import WORD_BLOCK, is_hopper
from shared.kernels.quantised import StoredMatrix
from shared.layers.attention import Attention, AttentionShape, NarrowHeads, SelfAttention
from shared.layers.decoder_layer import DecoderLayer, Mlp
from shared.layers.linear import Linear, steadied
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
from shared.models.other_vocabulary import in_other_vocabulary, with_ids
from shared.models.shard import Shard, shard_of
from shared.models.weights import (
    AT_ONCE,
    CopyPace,
    Stays,
    WeightTensors,
    read_weights,
    stays_stored,
)
from shared.telemetry.start_up import start_phase
from shared.vocabulary_map import VocabularyMap

# What else stands beside next-token layers.
MTP_PREFIXES = ("model.mtp.", "mtp.")


class MtpStyle(enum.Enum):
    """The spellings; MIMO's concatenates in the opposite order, see `MtpLayer`."""

    DEEPSEEK = "model.layers."
    MIMO = "model.mtp_layers."
    MIMO_V2 = "model.mtp.layers."
    QWEN = "mtp.layers."


# In a DeepSeek-style folder the layers are numbered on from the decoder's own, so only the
# tensors that no decoder layer has tell them apart.
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
        style: None when there are none.
        prefixes: what the keys of each layer begin with, first layer first.
    """

    style: MtpStyle | None
    prefixes: tuple[str, ...]


def find_mtp_layers(keys: Collection[str]) -> MtpLayers:
    """Returns the next-token layers among the keys of a checkpoint."""
    for style, pattern in _KEYS.items():
        found = {(int(match[2]), match[1]) for match in map(pattern.match, keys) if match}
        if found:
            return MtpLayers(style, tuple(f"{root}{number}." for number, root in sorted(found)))
    return MtpLayers(None, ())


def load_decoder(
    folder: Path,
    *,
    dtype: torch.dtype,
    device: torch.device,
    options: ModelOptions = ModelOptions(),  # noqa: B008 - frozen
    pace: CopyPace = AT_ONCE,
    show_progress: bool = False,
    group: TensorGroup | None = None,
    vocabulary: VocabularyMap | None = None,
    vocab_size: int = 0,
) -> Decoder:
    """Reads config and weights to `device`, cast to `dtype`.

    Args:
        options: quantisation is that of the layers. Embedding and lm_head stay as they are: one
            is only looked up in, the other may be the same tensor, and it ranks the tokens.
            Matrices that come in 8 bits stay so, see `stays_stored`.
        group: processes that share the model; each reads its part, see `Shard`.
        vocabulary: of another model, whose ids this one is to speak; None keeps its own.
        vocab_size: ids of that model, or of one with the same tokenizer; 0 keeps those of the
            checkpoint, as a group does.

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
    pace: CopyPace = AT_ONCE,
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
        # Next-token layers are a drafter's.
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

    Takes them out of the dict as it goes, so that packed weights are not held twice.
    """
    embedding = tensors.pop("embedding")
    head = embedding if config.tie_word_embeddings else tensors.pop("lm_head")
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
        lm_head=replace(Linear.of(head), cap=config.logit_cap),
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
    if options.is_deterministic:
        decoder = replace(decoder, layers=steadied(decoder.layers))
    return decoder


def build_layer(
    config: ModelConfig,
    tensors: WeightTensors,
    shape: AttentionShape,
    layer: int,
    quantisation: Quantisation = Quantisation.UNQUANT,
    group: TensorGroup | None = None,
) -> DecoderLayer:
    """Takes the tensors of `layers.{layer}.` out of the dict; see `decoder_weights.layer_parts`.

    Args:
        group: of the whole model; see `build_decoder`.
    """
    own = LayerTensors(config, tensors, layer, quantisation, group)
    has_input_norm = config.family.norms is not NormPlacement.AFTER
    has_output_norm = config.family.norms is not NormPlacement.BEFORE
    build: Callable[[LayerTensors, AttentionShape], SelfAttention] = build_attention
    if config.has_state(layer):
        build = build_delta
    elif config.latent is not None:
        build = build_latent
    return DecoderLayer(
        attention_norm=own.norm("attention_norm") if has_input_norm else None,
        attention=build(own, shape),
        mlp_norm=own.norm("mlp_norm") if has_input_norm else None,
        mlp=build_experts(own) if own.has("router.weight") else _gated_block(own),
        attention_output_norm=own.norm("attention_output_norm") if has_output_norm else None,
        mlp_output_norm=own.norm("mlp_output_norm") if has_output_norm else None,
    )


def _gated_block(own: LayerTensors) -> Mlp:
    gate_up, down = (
        own.tensors.pop_matrix(f"{own.prefix}{name}.weight") for name in ("gate_up", "down")
    )
    bias, down_bias = own.pop_if_any("gate_up.bias"), own.pop_if_any("down.bias")
    # Of an update, what has not come is on the meta device.
    rest = -down.shape[1] % WORD_BLOCK
    if rest and (is_hopper(gate_up.device) or is_hopper(down.device)):
        gate_up, bias, down = _padded(gate_up, bias, down, rest)
    return Mlp(
        Linear.of(gate_up, bias, own.quantisation),
        Linear.of(down, down_bias, own.quantisation, own.own_group),
        own.config.activation,
        own.config.layer_limits(own.layer)[0],
    )


def _padded(
    gate_up: Tensor | StoredMatrix, bias: Tensor | None, down: Tensor | StoredMatrix, rest: int
) -> tuple[Tensor | StoredMatrix, Tensor | None, Tensor | StoredMatrix]:
    """Returns the weights of a gated block with `rest` channels of zeros behind the others, which
    add nothing: the second product keeps bits, and reads 8-bit weights as they are, only if its
    depth is a multiple of 128."""
    if bias is not None:
        bias = _longer(bias, 2, rest)
    if isinstance(gate_up, StoredMatrix):
        # Halves that are not whole blocks have scales for each row.
        values, scales = _longer(gate_up.values, 2, rest), _longer(gate_up.scales, 2, rest)
        gate_up = replace(gate_up, values=values, scales=scales)
    else:
        gate_up = _longer(gate_up, 2, rest)
    if isinstance(down, StoredMatrix):
        # Zeros lie in the last block or take the scale of their row.
        return gate_up, bias, replace(down, values=_wider(down.values, rest))
    return gate_up, bias, _wider(down, rest)


def _longer(rows: Tensor, num_parts: int, rest: int) -> Tensor:
    """Returns the rows with `rest` rows of zeros behind each of equal parts of them."""
    parts = rows.view(num_parts, -1, *rows.shape[1:])
    longer = parts.new_zeros(num_parts, parts.shape[1] + rest, *rows.shape[1:])
    longer[:, : parts.shape[1]] = parts
    return longer.flatten(0, 1)


def _wider(rows: Tensor, rest: int) -> Tensor:
    """Returns the rows with `rest` zeros behind each."""
    wider = rows.new_zeros(len(rows), rows.shape[1] + rest)
    wider[:, : rows.shape[1]] = rows
    return wider


def build_attention(own: LayerTensors, shape: AttentionShape) -> Attention:
    """Takes the tensors of one layer's attention out of the dict."""
    config, qk_norm, joint_norms = own.config, None, None
    gate = own.pop_if_any("head_gate.weight")
    if config.has_qk_norm:
        weight = own.norm("qk_norm").weight
        qk_norm = RmsNorm(weight.view(-1, config.head_dim), config.rms_norm_eps)
    if config.has_unit_norm and own.layer not in config.unrotated_layers:
        # Rotation leaves the length of a head as it is, so norms may stand before it.
        size = shape.num_heads + shape.num_kv_heads, config.head_dim
        qkv = own.tensors[f"{own.prefix}qkv.weight"]
        qk_norm = RmsNorm(qkv.new_ones(size, dtype=own.tensors.dtype), config.rms_norm_eps)
    if config.norms_all_heads:
        joint_norms = own.norm("query_norm"), own.norm("key_norm")
    return Attention(
        shape=shape,
        qkv=own.linear("qkv"),
        output=own.linear("output", own.own_group),
        qk_norm=qk_norm,
        layer=own.cache_layer,
        joint_norms=joint_norms,
        sinks=own.pop_if_any("sinks"),
        narrow=_narrow(config, own.layer),
        head_gate=Linear.of(gate) if gate is not None else None,
        is_gated=config.family.is_gated,
    )


def _narrow(config: ModelConfig, layer: int) -> NarrowHeads | None:
    hybrid = config.hybrid
    if hybrid is None:
        return None
    return NarrowHeads(config.layer_kv_heads(layer), hybrid.value_dim, hybrid.value_scale)
