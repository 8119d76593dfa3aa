"""Decoders of random weights, which cost what trained ones cost."""

from __future__ import annotations

import zlib
from collections import defaultdict
from collections.abc import Sequence

import torch
from torch import Tensor

from shared.layers.tensor_group import TensorGroup
from shared.model_options import ModelOptions
from shared.models.config import ModelConfig
from shared.models.decoder import Decoder
from shared.models.decoder_weights import decoder_parts
from shared.models.heads.head import DraftHead
from shared.models.heads.mtp_loader import build_mtp, mtp_parts
from shared.models.heads.target_tensors import TargetTensors
from shared.models.loader import MtpLayers, build_decoder
from shared.models.scaled_weights import ScaleBlock, StoredLayout
from shared.models.shard import shard_of
from shared.models.weights import (
    WeightPart,
    WeightTensors,
    empty_targets,
    layout_of,
    scales_of,
)

# Keeps activations in range.
_DEVIATION = 0.02
_META = torch.device("meta")


class RandomWeights(WeightTensors):
    """Weights that are drawn when they are taken out, so that no more of them than one are held
    beside what a loader has made of the others."""

    def __init__(
        self,
        parts: Sequence[WeightPart],
        dtype: torch.dtype,
        device: torch.device,
        block: ScaleBlock | None = None,
    ) -> None:
        """`block` is what shares a scale in matrices of e4m3; without one, they are wide."""
        layouts = {} if block is None else _layouts(parts, block)
        super().__init__(empty_targets(parts, dtype, _META, layouts), dtype, layouts)
        self._device = device
        self._generator = torch.Generator(device)

    def pop(self, name: str, default: Tensor | None = None) -> Tensor | None:  # type: ignore[override]
        if name not in self:
            return default
        shape = super().pop(name)
        weight = torch.empty(shape.shape, dtype=shape.dtype, device=self._device)
        # By name, so that processes which share a model draw the same where all have the whole.
        self._generator.manual_seed(zlib.crc32(name.encode()))
        if shape.dtype is torch.float8_e4m3fn:
            wide = torch.empty(shape.shape, dtype=self.dtype, device=self._device)
            return wide.normal_(generator=self._generator).to(shape.dtype)
        if name.endswith(scales_of("")):
            return weight.uniform_(0.5 * _DEVIATION, _DEVIATION, generator=self._generator)
        is_norm = shape.dim() == 1 and "norm" in name
        return weight.normal_(1.0 if is_norm else 0.0, _DEVIATION, generator=self._generator)


def _layouts(parts: Sequence[WeightPart], block: ScaleBlock) -> dict[str, StoredLayout]:
    by_target: dict[str, list[WeightPart]] = defaultdict(list)
    for part in parts:
        by_target[part.target].append(part)
    found = {
        target: layout_of(own, torch.float8_e4m3fn, block)
        for target, own in by_target.items()
        if all(part.may_stay for part in own)
    }
    return {target: layout for target, layout in found.items() if layout is not None}


def random_decoder(
    config: ModelConfig,
    device: torch.device,
    options: ModelOptions = ModelOptions(),  # noqa: B008 - frozen
    group: TensorGroup | None = None,
    block: ScaleBlock | None = None,
) -> Decoder:
    """Returns a decoder of normal weights in bfloat16; of a group this process's part.

    Args:
        block: see `RandomWeights`.
    """
    weights = RandomWeights(decoder_parts(config, shard_of(group)), torch.bfloat16, device, block)
    return build_decoder(config, weights, device, options, group)


def mtp_parts_of(config: ModelConfig, layers: MtpLayers) -> tuple[WeightPart, ...]:
    """Returns the tensors of next-token layers; they have experts where their model has some."""
    keys = [f"{prefix}mlp.experts.0" for prefix in layers.prefixes if config.experts is not None]
    return tuple(mtp_parts(config, layers, keys))


def random_mtp(
    config: ModelConfig,
    layers: MtpLayers,
    decoder: Decoder,
    options: ModelOptions = ModelOptions(),  # noqa: B008 - frozen
    block: ScaleBlock | None = None,
) -> DraftHead:
    """Returns next-token layers of normal weights, with the tables of `decoder`.

    Args:
        config: see `mtp_config`.
        block: see `RandomWeights`.
    """
    dtype, device = decoder.dtype, decoder.device
    weights = RandomWeights(mtp_parts_of(config, layers), dtype, device, block)
    target = TargetTensors.of_decoder(decoder, dtype)
    return build_mtp(config, layers, weights, target, device, options)
