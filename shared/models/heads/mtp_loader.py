"""Loads next-token layers (MTP) as a draft head; their folder is by default the target's."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from shared.errors import CheckpointError
from shared.layers.attention import ForwardContext, SelfAttention
from shared.layers.decoder_layer import DecoderLayer
from shared.layers.linear import Linear
from shared.layers.norm import RmsNorm
from shared.layers.rotary import Rotary
from shared.model_options import ModelOptions, Quantisation
from shared.models.checkpoint import Checkpoint
from shared.models.config import ModelConfig, text_config
from shared.models.config_file import CONFIG_FILE, ConfigFile
from shared.models.decoder import attention_shape
from shared.models.decoder_weights import IGNORED_SUFFIXES, DecoderKeys, layer_parts, norm_from
from shared.models.heads.feature_spec import FeatureSpec
from shared.models.heads.head import DraftHead, DraftVocabulary
from shared.models.heads.target_tensors import TargetTensors
from shared.models.loader import (
    MtpLayers,
    MtpStyle,
    build_layer,
    find_mtp_layers,
)
from shared.models.weights import (
    FULL_PACE,
    CopyPace,
    WeightPart,
    WeightTensors,
    read_weights,
    stays_stored,
)

LAYER_COUNT_KEYS = ("num_nextn_predict_layers", "mtp_num_hidden_layers")
# Copies of the target's tensors; the head uses the target's own.
_SHARED_SUFFIXES = (
    ".embed_tokens.weight",
    ".shared_head.head.weight",
    ".shared_head.output.weight",
)
# Other names that some checkpoints have for the norm before the feed-forward block and the norm
# after it.
_ALIASES = (
    ("post_attention_layernorm", "pre_mlp_layernorm"),
    ("shared_head", "transformer.shared_head"),
)
# Prefix of the tensors that all next-token layers of `MtpStyle.QWEN` share.
_QWEN_ROOT = "mtp."
_NAMES = {
    MtpStyle.DEEPSEEK: {
        "enorm": "embedding_norm",
        "hnorm": "hidden_norm",
        "shared_head.norm": "state_norm",
        "eh_proj": "projection",
    },
    MtpStyle.MIMO_V2: {
        "enorm": "embedding_norm",
        "hnorm": "hidden_norm",
        "final_layernorm": "state_norm",
        "eh_proj": "projection",
    },
    MtpStyle.MIMO: {
        "token_layernorm": "embedding_norm",
        "hidden_layernorm": "hidden_norm",
        "final_layernorm": "state_norm",
        "input_proj": "projection",
    },
    MtpStyle.QWEN: {
        "pre_fc_norm_embedding": "embedding_norm",
        "pre_fc_norm_hidden": "hidden_norm",
        "norm": "state_norm",
        "fc": "projection",
    },
}


@dataclass(frozen=True, slots=True)
class MtpLayer:
    """See `HeadLayer`. Its state is normed if the target's hidden state is.

    Most layers read `cat(embedding, hidden)`. MiMo's layers read `cat(hidden, embedding)`, and
    were trained with zeros for the embedding at position 0.

    Source: DeepSeek-V3, arXiv 2412.19437, section 2.2, equations 21 to 23; MiMo, arXiv 2505.07608,
    section 2.2.

    Attributes:
        projection: `2H` to `H`.
        state_norm: None in layers that return the input of the norm before the lm_head.
    """

    style: MtpStyle
    embedding_norm: RmsNorm
    hidden_norm: RmsNorm
    projection: Linear
    block: DecoderLayer
    state_norm: RmsNorm | None

    @property
    def attention(self) -> SelfAttention:
        return self.block.attention

    def __call__(self, embedded: Tensor, hidden: Tensor, context: ForwardContext) -> Tensor:
        if self.style is not MtpStyle.MIMO:
            inputs = (self.embedding_norm(embedded), self.hidden_norm(hidden))
        else:
            is_first = (context.batch.positions == 0).unsqueeze(1)
            embedded = embedded.masked_fill(is_first, 0.0)
            inputs = (self.hidden_norm(hidden), self.embedding_norm(embedded))
        states = self.block(self.projection(torch.cat(inputs, dim=-1)), context)
        return states if self.state_norm is None else self.state_norm(states)


def load_mtp(
    folder: Path,
    target: TargetTensors,
    *,
    dtype: torch.dtype,
    device: torch.device,
    options: ModelOptions = ModelOptions(),  # noqa: B008 - frozen
    pace: CopyPace = FULL_PACE,
) -> DraftHead:
    """Reads the next-token layers, cast to `dtype`, straight to `device`.

    Args:
        options: quantisation applies to the layers, see `load_decoder`.

    Raises:
        CheckpointError: as `load_head`, or if the folder has no next-token layers, or not as many
            as its config says.
    """
    checkpoint = Checkpoint.open(folder, options.load_format)
    layers = find_mtp_layers(checkpoint.files)
    config = _config(folder, layers, target.config)
    own_prefixes = (
        (*layers.prefixes, _QWEN_ROOT) if layers.style is MtpStyle.QWEN else layers.prefixes
    )
    tensors = read_weights(
        checkpoint,
        tuple(mtp_parts(config, layers, checkpoint.files)),
        ignored_prefixes=[key for key in checkpoint.files if not key.startswith(own_prefixes)],
        ignored_suffixes=(*IGNORED_SUFFIXES, *_SHARED_SUFFIXES),
        dtype=dtype,
        device=device,
        stays=stays_stored(options.quantisation, dtype, device),
        pace=pace,
    )
    return build_mtp(config, layers, tensors, target, device, options)


def build_mtp(
    config: ModelConfig,
    layers: MtpLayers,
    tensors: WeightTensors,
    target: TargetTensors,
    device: torch.device,
    options: ModelOptions,
) -> DraftHead:
    """Returns the head of `tensors`, which are named by `mtp_parts`; removes them from the dict.

    Args:
        config: see `mtp_config`.
    """
    embedding = target.embedding()
    lm_head, indices = Linear.of(target.lm_head()), range(len(layers.prefixes))
    norms = [norm_from(config, tensors, f"layers.{index}.state_norm") for index in indices]
    state_norms = [None] * len(norms) if config.family.has_raw_mtp else norms
    head_norms = tuple(norms) if config.family.has_raw_mtp else ()
    head = DraftHead(
        config=config,
        feature_spec=FeatureSpec(
            (target.config.mtp_feature_layer,), tensors.dtype, config.hidden_size
        ),
        fusion=None,
        embedding=embedding,
        layers=tuple(
            _build_layer(config, layers, tensors, index, state_norms[index], options.quantisation)
            for index in indices
        ),
        vocabulary=DraftVocabulary(head_norms, lm_head, None, config.vocab_size, config.vocab_size),
        rotary=Rotary(config.rope, config.rotary_dim, device),
        attention_backend=options.attention_backend,
    )
    assert not tensors, f"weights were read but not used: {sorted(tensors)}"
    return head


def _config(folder: Path, layers: MtpLayers, target: ModelConfig) -> ModelConfig:
    """Returns the config of the folder, checked against its weights and the target."""
    num_layers = len(layers.prefixes)
    if num_layers == 0:
        raise CheckpointError(
            f"{folder} has no next-token layers: no key begins with {MtpStyle.MIMO.value}, "
            f"{MtpStyle.MIMO_V2.value}, {MtpStyle.QWEN.value} or {MtpStyle.DEEPSEEK.value}N.eh_proj"
        )
    file = text_config(ConfigFile.read(folder / CONFIG_FILE))
    for key in LAYER_COUNT_KEYS:
        stated = file.integer(key, num_layers)
        if stated != num_layers:
            raise CheckpointError(
                f"{file.path}: {key} is {stated}; the weights have {num_layers}, "
                f"{', '.join(layers.prefixes)}"
            )
    if file.flag("mtp_use_dedicated_embeddings", False):
        raise CheckpointError(
            f"{file.path}: mtp_use_dedicated_embeddings is true; next-token layers read the "
            f"target's embeddings"
        )
    config = mtp_config(ModelConfig.from_folder(folder), file, layers)
    for key, value, expected in (
        ("hidden_size", config.hidden_size, target.hidden_size),
        ("vocab_size", config.vocab_size, target.vocab_size),
    ):
        if value != expected:
            raise CheckpointError(f"{file.path}: {key} is {value}; the target's is {expected}")
    return config


def mtp_config(config: ModelConfig, file: ConfigFile, layers: MtpLayers) -> ModelConfig:
    """Returns the config of the next-token layers alone, made from their decoder's config.

    Those of MiMo-V2-Flash and Step-3.5 all have a sliding window; Step-3.5's config lists them
    after the decoder's layers. Qwen's have attention. Others are like the decoder's last layer.

    Source: MiMo-V2-Flash, arXiv 2601.02780, section 2.3.
    """
    count, first = len(layers.prefixes), config.num_layers
    limits = (config.mlp_limits[-1:] * count, config.expert_limits[-1:] * count)
    if config.family.has_raw_mtp:
        values = {"num_hidden_layers": first + count}
        with_mtp = ModelConfig.of(file.with_values(values), config.architecture)
        windows = with_mtp.sliding_windows[first:]
        limits = with_mtp.mlp_limits[first:], with_mtp.expert_limits[first:]
    elif layers.style is MtpStyle.MIMO_V2:
        windows = (next(filter(None, config.sliding_windows), None),) * count
    else:
        windows = config.sliding_windows[-1:] * count
    if len({*windows}) > 1:
        raise CheckpointError(
            f"{file.path}: some of {count} next-token layers have a sliding window; all or none "
            f"must have one"
        )
    rope = config.rope if windows[0] is None else config.sliding_rope or config.rope
    return replace(
        config,
        num_layers=count,
        sliding_windows=windows,
        rope=rope,
        sliding_rope=None,
        delta=None,
        mlp_limits=limits[0],
        expert_limits=limits[1],
    )


def mtp_parts(
    config: ModelConfig, layers: MtpLayers, keys: Collection[str]
) -> Iterator[WeightPart]:
    """Yields every tensor of the next-token layers.

    Args:
        config: see `mtp_config`.
        keys: keys of the checkpoint, which say whether the layers have experts.
    """
    assert layers.style is not None
    hidden = config.hidden_size
    has_stacks = DecoderKeys.of(keys).has_stacks
    for index, prefix in enumerate(layers.prefixes):
        target = f"layers.{index}."
        # Qwen's layers share these tensors.
        source = _QWEN_ROOT if layers.style is MtpStyle.QWEN else prefix
        for key, name in _NAMES[layers.style].items():
            shape = (hidden, 2 * hidden) if name == "projection" else (hidden,)
            part = WeightPart(
                f"{source}{key}.weight", shape, f"{target}{name}", may_stay=name == "projection"
            )
            yield _with_stored_key(part, keys)
        has_experts = any(key.startswith(f"{prefix}mlp.experts.") for key in keys)
        for part in layer_parts(
            config, prefix, target, layer=index, has_experts=has_experts, has_stacks=has_stacks
        ):
            yield _with_stored_key(part, keys)


def _with_stored_key(part: WeightPart, keys: Collection[str]) -> WeightPart:
    """Returns the part with the key that the checkpoint has for it, which may be an alias."""
    aliases = [part.key.replace(*names) for names in _ALIASES]
    key = next((alias for alias in aliases if alias in keys), part.key)
    return replace(part, key=key)


def _build_layer(
    config: ModelConfig,
    layers: MtpLayers,
    tensors: WeightTensors,
    index: int,
    state_norm: RmsNorm | None,
    quantisation: Quantisation,
) -> MtpLayer:
    assert layers.style is not None
    prefix = f"layers.{index}."
    return MtpLayer(
        style=layers.style,
        embedding_norm=norm_from(config, tensors, f"{prefix}embedding_norm"),
        hidden_norm=norm_from(config, tensors, f"{prefix}hidden_norm"),
        projection=Linear.of(tensors.pop_matrix(f"{prefix}projection"), None, quantisation),
        block=build_layer(config, tensors, attention_shape(config, index), index, quantisation),
        state_norm=state_norm,
    )
