"""From a DFlash folder and its target's tensors to a head on its device."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from shared.layers.attention import AttentionShape
from shared.layers.linear import Linear
from shared.layers.norm import RmsNorm
from shared.layers.rotary import Rotary
from shared.model_options import ModelOptions, Quantisation
from shared.models.checkpoint import Checkpoint
from shared.models.config import ModelConfig
from shared.models.decoder_weights import IGNORED_SUFFIXES, layer_parts
from shared.models.heads.dflash import DflashHead
from shared.models.heads.dflash_config import DflashConfig
from shared.models.heads.feature_spec import FeatureSpec
from shared.models.heads.target_tensors import TargetTensors
from shared.models.loader import build_layer
from shared.models.weights import WeightPart, read_weights

# Copies of the target's own, which the head borrows.
_SHARED_KEYS = ("embed_tokens.weight", "lm_head.weight")


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
        options: quantisation is that of the layers, see `load_decoder`.

    Raises:
        CheckpointError: if the folder is incomplete, damaged or made for another target; the
            message names the file, the key and, for a wrong shape, both shapes.
    """
    config = DflashConfig.from_folder(folder, target.config)
    checkpoint = Checkpoint.open(folder, options.load_format)
    tensors = read_weights(
        checkpoint,
        tuple(_parts(config, _root(checkpoint))),
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


def _root(checkpoint: Checkpoint) -> str:
    """Returns `model.` where the whole head is nested, else nothing."""
    return "model." if any(key.startswith("model.") for key in checkpoint.files) else ""


def _parts(config: DflashConfig, root: str) -> Iterator[WeightPart]:
    sizes = config.layers
    hidden = sizes.hidden_size
    yield WeightPart(f"{root}fc.weight", (hidden, len(config.feature_layers) * hidden), "fc")
    yield WeightPart(f"{root}hidden_norm.weight", (hidden,), "feature_norm")
    yield WeightPart(f"{root}norm.weight", (hidden,), "norm")
    for layer in range(sizes.num_layers):
        yield from layer_parts(sizes, f"{root}layers.{layer}.", f"layers.{layer}.")


def _context(
    sizes: ModelConfig, tensors: dict[str, Tensor], quantisation: Quantisation
) -> tuple[Linear, tuple[RmsNorm, ...]]:
    """Returns the keys' and values' part of every layer as one product, and the norms of keys.

    It is a copy: a layer's own product is packed together with its queries'.
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
