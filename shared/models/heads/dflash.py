"""A DFlash head: layers that draft a whole block of tokens in one non-causal pass.

The head reads the context only through the target's features: each layer turns them into keys and
values of the positions before the block. So a position's keys and values depend only on its own
features, and are computed once.

Source: Chen et al., DFlash, arXiv 2602.06036, section 4.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import torch
import torch.nn.functional as F
from torch import Tensor

from shared.errors import CheckpointError
from shared.kernels.pointwise import rotate
from shared.kv.batch import ForwardBatch
from shared.kv.pool import KvLayout, KvPool
from shared.layers.attention import AttentionShape, ForwardContext, plan_for
from shared.layers.decoder_layer import DecoderLayer
from shared.layers.linear import Linear
from shared.layers.norm import RmsNorm
from shared.layers.rotary import Rotary
from shared.model_options import AttentionBackend, ModelOptions, Quantisation
from shared.models.checkpoint import Checkpoint
from shared.models.config import ModelConfig
from shared.models.config_file import CONFIG_FILE, ConfigFile
from shared.models.decoder_weights import IGNORED_SUFFIXES, layer_parts
from shared.models.heads.block_size import read_block_size
from shared.models.heads.feature_spec import FeatureSpec, output_of
from shared.models.heads.target_tensors import TargetTensors
from shared.models.loader import build_layer
from shared.models.weights import WeightPart, WeightTensors, read_weights

_LAYER_ARCHITECTURE = "Qwen3ForCausalLM"

# Copies of the target's tensors; the head uses the target's own.
_SHARED_KEYS = ("embed_tokens.weight", "lm_head.weight")


@dataclass(frozen=True, slots=True)
class DflashConfig:
    """Sizes of a DFlash head.

    Attributes:
        layers: sizes of its layers, which are Qwen3 layers.
        feature_layers: see `FeatureSpec.layer_indices`.
        block_size: rows of a block, the last committed token included.
        mask_token_id: the input token at positions to be drafted.
    """

    layers: ModelConfig
    feature_layers: tuple[int, ...]
    block_size: int
    mask_token_id: int

    @classmethod
    def from_folder(cls, folder: Path, target: ModelConfig) -> Self:
        """Reads `config.json`.

        Raises:
            CheckpointError: for a missing or mistyped key, or a value that does not fit the
                target; names key and values.
        """
        config = ConfigFile.read(folder / CONFIG_FILE)
        layers = ModelConfig.of(config, _LAYER_ARCHITECTURE)
        _check_target(config, layers, target)
        return cls(
            layers=layers,
            feature_layers=_feature_layers(config, layers.num_layers, target.num_layers),
            block_size=read_block_size(config),
            mask_token_id=_mask_token_id(config, target.vocab_size),
        )


def _check_target(config: ConfigFile, layers: ModelConfig, target: ModelConfig) -> None:
    """Checks sizes against the target, whose embedding and lm_head the head uses."""
    num_layers = config.integer("num_target_layers", target.num_layers)
    for key, value, expected in (
        ("hidden_size", layers.hidden_size, target.hidden_size),
        ("num_target_layers", num_layers, target.num_layers),
    ):
        if value != expected:
            raise CheckpointError(f"{config.path}: {key} is {value}; the target's is {expected}")
    if "sliding_attention" in config.texts("layer_types"):
        raise CheckpointError(
            f"{config.path}: layer_types has sliding_attention; only full_attention is supported "
            f"in a DFlash head"
        )


def _feature_layers(config: ConfigFile, num_layers: int, num_target_layers: int) -> tuple[int, ...]:
    """Converts the config's layers, which count outputs, to those of `FeatureSpec`.

    The last layer's output is taken after the final norm: heads are trained on the
    `hidden_states` of transformers, whose last entry is normed.

    Source: `extract_context_feature` in the DFlash authors' code, github.com/z-lab/dflash.
    """
    key = "target_layer_ids"
    ids = config.nested("dflash_config").integers(key) or _default_ids(
        config, num_layers, num_target_layers
    )
    if min(ids) < 0 or max(ids) >= num_target_layers:
        raise CheckpointError(
            f"{config.path}: {key} is {list(ids)}; the target has layers [0, {num_target_layers})"
        )
    return tuple(output_of(index, num_target_layers) for index in ids)


def _default_ids(config: ConfigFile, count: int, num_target_layers: int) -> tuple[int, ...]:
    if count > 1 and num_target_layers < 4:
        raise CheckpointError(
            f"{config.path} has no dflash_config.target_layer_ids, and a target of "
            f"{num_target_layers} layers has no default; at least 4 are needed"
        )
    return spread_layers(count, num_target_layers)


def spread_layers(count: int, num_target_layers: int) -> tuple[int, ...]:
    """Returns `count` evenly spread layers of the target, for a head whose config names none.

    Source: Chen et al., DFlash, arXiv 2602.06036, section 4.
    """
    if count == 1:
        return (num_target_layers // 2,)
    span = num_target_layers - 4
    return tuple(round(1 + index * span / (count - 1)) for index in range(count))


def _mask_token_id(config: ConfigFile, vocab_size: int) -> int:
    key = "mask_token_id"
    nested = config.nested("dflash_config")
    if key not in nested and key not in config:
        raise CheckpointError(f"{config.path} has no dflash_config.{key}")
    token = (nested if key in nested else config).integer(key)
    if not 0 <= token < vocab_size:
        raise CheckpointError(
            f"{config.path}: {key} is {token}; it must be in [0, {vocab_size}), the target's "
            f"vocab_size"
        )
    return token


@dataclass(frozen=True, slots=True)
class DflashHead:
    """Weights and the two passes of one head.

    Attributes:
        feature_spec: the features that the target sends; the target applies `fc`.
        feature_norm: applied to a feature row, before it becomes keys and values.
        context: `H` to keys and values of every layer, `[layer][key, value][head][dim]`.
        key_norms: one per layer, weight `[num_kv_heads, head_dim]`.
        embedding: `[V, H]`, the target's.
        lm_head: `H` to `V`, the target's.
    """

    config: DflashConfig
    feature_spec: FeatureSpec
    feature_norm: RmsNorm
    context: Linear
    key_norms: tuple[RmsNorm, ...]
    embedding: Tensor
    layers: tuple[DecoderLayer, ...]
    norm: RmsNorm
    lm_head: Linear
    rotary: Rotary
    attention_backend: AttentionBackend = AttentionBackend.AUTO

    @property
    def device(self) -> torch.device:
        return self.embedding.device

    @property
    def dtype(self) -> torch.dtype:
        return self.embedding.dtype

    @property
    def vocab_size(self) -> int:
        return self.embedding.shape[0]

    def kv_layout(self, page_size: int, dtype: torch.dtype | None = None) -> KvLayout:
        """Returns the layout of this head's cache, in `dtype` or the head's own."""
        sizes = self.config.layers
        return KvLayout(
            num_layers=sizes.num_layers,
            num_kv_heads=sizes.num_kv_heads,
            head_dim=sizes.head_dim,
            page_size=page_size,
            dtype=dtype or self.dtype,
        )

    def write_context(self, rows: Tensor, positions: Tensor, slots: Tensor, pool: KvPool) -> None:
        """Writes keys and values of R context positions to `pool`, in every layer.

        Args:
            rows: `[R, W]`, the features of the positions.
            positions: `[R]` int64.
            slots: `[R]` int64.
        """
        sizes = self.config.layers
        states = self.feature_norm(rows.to(device=self.device, dtype=self.dtype))
        shape = (len(rows), len(self.layers), 2, sizes.num_kv_heads, sizes.head_dim)
        keys, values = self.context(states).view(shape).unbind(2)
        cos, signed_sin = self.rotary.tables(positions)
        for layer, norm in enumerate(self.key_norms):
            rotated = rotate(norm(keys[:, layer]), cos, signed_sin)
            pool.write(layer, slots, rotated, values[:, layer])

    def forward(self, batch: ForwardBatch, pool: KvPool) -> Tensor:
        """Returns the states `[T, H]` of the rows of blocks. The batch's mask lets the rows of a
        block see each other. Their keys and values in `pool` are not used after this forward."""
        cos, signed_sin = self.rotary.tables(batch.positions)
        shape = self.layers[0].attention.shape
        plans = {shape.sliding_window: plan_for(batch, shape, self.attention_backend)}
        context = ForwardContext(batch, pool, cos, signed_sin, plans)
        states = F.embedding(batch.token_ids, self.embedding)
        for layer in self.layers:
            states = layer(states, context)
        return self.norm(states)

    def logits(self, states: Tensor) -> Tensor:
        """Returns `[L, V]` float32 for `states` `[L, H]`."""
        return self.lm_head(states).float()


def load_dflash(
    folder: Path,
    target: TargetTensors,
    *,
    dtype: torch.dtype,
    device: torch.device,
    options: ModelOptions = ModelOptions(),  # noqa: B008 - frozen
) -> DflashHead:
    """Reads config and weights, cast to `dtype`, straight to `device`.

    Args:
        options: quantisation applies to the layers, see `load_decoder`.

    Raises:
        CheckpointError: as `load_head`.
    """
    config = DflashConfig.from_folder(folder, target.config)
    checkpoint = Checkpoint.open(folder, options.load_format)
    # Some checkpoints nest the whole head under `model.`.
    root = "model." if any(key.startswith("model.") for key in checkpoint.files) else ""
    tensors = read_weights(
        checkpoint,
        tuple(_parts(config, root)),
        ignored_prefixes=_SHARED_KEYS,
        ignored_suffixes=IGNORED_SUFFIXES,
        dtype=dtype,
        device=device,
    )
    sizes = config.layers
    context, key_norms = _context(sizes, tensors, options.quantisation)
    shape = AttentionShape(sizes.num_heads, sizes.num_kv_heads, sizes.head_dim)
    fc = tensors.pop("fc")
    head = DflashHead(
        config=config,
        feature_spec=FeatureSpec(config.feature_layers, dtype, sizes.hidden_size, fc),
        feature_norm=RmsNorm(tensors.pop("feature_norm"), sizes.rms_norm_eps),
        context=context,
        key_norms=key_norms,
        embedding=target.embedding(),
        layers=tuple(
            build_layer(sizes, tensors, shape, index, options.quantisation)
            for index in range(sizes.num_layers)
        ),
        norm=RmsNorm(tensors.pop("norm"), sizes.rms_norm_eps),
        lm_head=Linear.of(target.lm_head()),
        rotary=Rotary(sizes.rope, sizes.head_dim, device),
        attention_backend=options.attention_backend,
    )
    assert not tensors, f"weights were read but not used: {sorted(tensors)}"
    return head


def _parts(config: DflashConfig, root: str) -> Iterator[WeightPart]:
    sizes = config.layers
    hidden = sizes.hidden_size
    yield WeightPart(f"{root}fc.weight", (hidden, len(config.feature_layers) * hidden), "fc")
    yield WeightPart(f"{root}hidden_norm.weight", (hidden,), "feature_norm")
    yield WeightPart(f"{root}norm.weight", (hidden,), "norm")
    for layer in range(sizes.num_layers):
        yield from layer_parts(sizes, f"{root}layers.{layer}.", f"layers.{layer}.")


def _context(
    sizes: ModelConfig, tensors: WeightTensors, quantisation: Quantisation
) -> tuple[Linear, tuple[RmsNorm, ...]]:
    """Returns one product for the keys and values of all layers, and each layer's key norm.

    The product is a copy: a layer's own keys and values are packed together with its queries.
    """
    first_key = sizes.num_heads * sizes.head_dim
    weights, biases, norms = [], [], []
    for layer in range(sizes.num_layers):
        prefix = f"layers.{layer}."
        weights.append(tensors[f"{prefix}qkv.weight"][first_key:])
        if sizes.has_qkv_bias:
            biases.append(tensors[f"{prefix}qkv.bias"][first_key:])
        norm = tensors[f"{prefix}qk_norm"].view(-1, sizes.head_dim)[sizes.num_heads :]
        norms.append(RmsNorm(norm, sizes.rms_norm_eps))
    bias = torch.cat(biases) if biases else None
    return Linear.of(torch.cat(weights), bias, quantisation), tuple(norms)
