"""From a folder with next-token layers, by default the target's own, to a draft head."""

from __future__ import annotations

from collections.abc import Iterator
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
from shared.models.config import ModelConfig
from shared.models.config_file import CONFIG_FILE, ConfigFile
from shared.models.decoder import attention_shape
from shared.models.decoder_weights import IGNORED_SUFFIXES, layer_parts
from shared.models.heads.feature_spec import FeatureSpec
from shared.models.heads.head import DraftHead, DraftVocabulary
from shared.models.heads.target_tensors import TargetTensors
from shared.models.loader import MtpLayers, MtpStyle, build_layer, find_mtp_layers
from shared.models.weights import AT_ONCE, CopyPace, WeightPart, read_weights

LAYER_COUNT_KEY = "num_nextn_predict_layers"
# Copies of the target's own, which the head borrows.
_SHARED_SUFFIXES = (".embed_tokens.weight", ".shared_head.head.weight")
# What some checkpoints call the norm before the feed-forward block.
_OTHER_NORM = ("post_attention_layernorm", "pre_mlp_layernorm")
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
}


@dataclass(frozen=True, slots=True)
class MtpLayer:
    """See `HeadLayer`. The state it hands on is normed, as the target's hidden state is.

    Most layers read `cat(embedding, hidden)`. MiMo's read `cat(hidden, embedding)`, and
    were trained with zeros for the embedding at position 0.

    Source: DeepSeek-V3, arXiv 2412.19437, section 2.2, equations 21 to 23; MiMo, arXiv 2505.07608,
    section 2.2.

    Attributes:
        projection: `2H` to `H`.
    """

    style: MtpStyle
    embedding_norm: RmsNorm
    hidden_norm: RmsNorm
    projection: Linear
    block: DecoderLayer
    state_norm: RmsNorm

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
        return self.state_norm(self.block(self.projection(torch.cat(inputs, dim=-1)), context))


def load_mtp(
    folder: Path,
    target: TargetTensors,
    *,
    dtype: torch.dtype,
    device: torch.device,
    options: ModelOptions = ModelOptions(),  # noqa: B008 - frozen
    pace: CopyPace = AT_ONCE,
) -> DraftHead:
    """Reads the next-token layers, cast to `dtype`, straight to `device`.

    Args:
        options: quantisation is that of the layers, see `load_decoder`.

    Raises:
        CheckpointError: if the folder has none, or not as many as its config says, or is damaged
            or made for another target; the message names the file, the key and, for a wrong shape,
            both shapes.
    """
    checkpoint = Checkpoint.open(folder, options.load_format)
    layers = find_mtp_layers(checkpoint.files)
    config = _config(folder, layers, target.config)
    tensors = read_weights(
        checkpoint,
        tuple(_parts(config, layers, checkpoint)),
        ignored_prefixes=[k for k in checkpoint.files if not k.startswith(layers.prefixes)],
        ignored_suffixes=(*IGNORED_SUFFIXES, *_SHARED_SUFFIXES),
        dtype=dtype,
        device=device,
        pace=pace,
    )
    embedding = target.embedding()
    lm_head = Linear.of(target.lm_head())
    head = DraftHead(
        config=config,
        feature_spec=FeatureSpec((target.config.num_layers + 1,), dtype, config.hidden_size),
        fusion=None,
        embedding=embedding,
        layers=tuple(
            _build(config, layers, tensors, index, options.quantisation)
            for index in range(len(layers.prefixes))
        ),
        vocabulary=DraftVocabulary(None, lm_head, None, config.vocab_size, config.vocab_size),
        rotary=Rotary(config.rope, config.rotary_dim, device),
        attention_backend=options.attention_backend,
    )
    assert not tensors, f"weights were read but not used: {sorted(tensors)}"
    return head


def _config(folder: Path, layers: MtpLayers, target: ModelConfig) -> ModelConfig:
    """Returns the config of the folder, held against its weights and the target."""
    num_layers = len(layers.prefixes)
    if num_layers == 0:
        raise CheckpointError(
            f"{folder} has no next-token layers: no key begins with {MtpStyle.MIMO.value}, "
            f"{MtpStyle.MIMO_V2.value} or {MtpStyle.DEEPSEEK.value}N.eh_proj"
        )
    file = ConfigFile.read(folder / CONFIG_FILE)
    stated = file.integer(LAYER_COUNT_KEY, num_layers)
    if stated != num_layers:
        raise CheckpointError(
            f"{file.path}: {LAYER_COUNT_KEY} is {stated}; the weights have {num_layers}, "
            f"{', '.join(layers.prefixes)}"
        )
    config = ModelConfig.from_folder(folder)
    if config.has_head_gates or config.delta is not None:
        raise CheckpointError(
            f"{file.path}: next-token layers of {config.architecture} are not supported"
        )
    if layers.style is MtpStyle.MIMO_V2:
        config = _sliding(config, num_layers)
    for key, own, needed in (
        ("hidden_size", config.hidden_size, target.hidden_size),
        ("vocab_size", config.vocab_size, target.vocab_size),
    ):
        if own != needed:
            raise CheckpointError(f"{file.path}: {key} is {own}; the target's is {needed}")
    return config


def _sliding(config: ModelConfig, num_layers: int) -> ModelConfig:
    """Returns the config of layers that are all as the sliding ones of a decoder.

    Source: MiMo-V2-Flash, arXiv 2601.02780, section 2.3.
    """
    window = next((each for each in config.sliding_windows if each is not None), None)
    return replace(
        config,
        num_layers=num_layers,
        sliding_windows=(window,) * num_layers,
        rope=config.sliding_rope or config.rope,
        sliding_rope=None,
    )


def _parts(config: ModelConfig, layers: MtpLayers, checkpoint: Checkpoint) -> Iterator[WeightPart]:
    assert layers.style is not None
    hidden = config.hidden_size
    for index, prefix in enumerate(layers.prefixes):
        for key, name in _NAMES[layers.style].items():
            shape = (hidden, 2 * hidden) if name == "projection" else (hidden,)
            yield WeightPart(f"{prefix}{key}.weight", shape, f"layers.{index}.{name}")
        has_experts = any(key.startswith(f"{prefix}mlp.experts.") for key in checkpoint.files)
        for part in layer_parts(
            config, prefix, f"layers.{index}.", layer=index, has_experts=has_experts
        ):
            other = part.key.replace(*_OTHER_NORM)
            yield replace(part, key=other) if other in checkpoint.files else part


def _build(
    config: ModelConfig,
    layers: MtpLayers,
    tensors: dict[str, Tensor],
    index: int,
    quantisation: Quantisation,
) -> MtpLayer:
    assert layers.style is not None
    prefix, eps = f"layers.{index}.", config.rms_norm_eps
    shape = attention_shape(config, config.num_layers - 1)
    return MtpLayer(
        style=layers.style,
        embedding_norm=RmsNorm(tensors.pop(f"{prefix}embedding_norm"), eps),
        hidden_norm=RmsNorm(tensors.pop(f"{prefix}hidden_norm"), eps),
        projection=Linear.of(tensors.pop(f"{prefix}projection"), None, quantisation),
        block=build_layer(config, tensors, shape, index, quantisation),
        state_norm=RmsNorm(tensors.pop(f"{prefix}state_norm"), eps),
    )
