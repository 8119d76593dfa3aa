"""Decoders of random weights, which cost what trained ones cost."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import torch
from torch import Tensor

from shared.layers.tensor_group import TensorGroup
from shared.model_options import ModelOptions
from shared.models.config import ModelConfig
from shared.models.decoder import Decoder
from shared.models.decoder_weights import decoder_parts
from shared.models.loader import build_decoder
from shared.models.shard import shard_of
from shared.models.weights import WeightPart, WeightTensors, empty_targets

# Keeps activations in range.
_DEVIATION = 0.02


class RandomWeights(WeightTensors):
    """Weights that are drawn when they are taken out, so that no more of them than one are held
    beside what a loader has made of the others."""

    def __init__(
        self, parts: Sequence[WeightPart], dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__(empty_targets(parts, dtype, torch.device("meta")), dtype, {})
        self._device = device
        self._generator = torch.Generator(device)

    def pop(self, name: str, default: Tensor | None = None) -> Tensor | None:  # type: ignore[override]
        if name not in self:
            return default
        shape = super().pop(name)
        weight = torch.empty(shape.shape, dtype=shape.dtype, device=self._device)
        # By name, so that processes which share a model draw the same where all have the whole.
        self._generator.manual_seed(zlib.crc32(name.encode()))
        is_norm = shape.dim() == 1 and "norm" in name
        return weight.normal_(1.0 if is_norm else 0.0, _DEVIATION, generator=self._generator)


def random_decoder(
    config: ModelConfig,
    device: torch.device,
    options: ModelOptions = ModelOptions(),  # noqa: B008 - frozen
    group: TensorGroup | None = None,
) -> Decoder:
    """Returns a decoder of normal weights in bfloat16; of a group this process's part."""
    weights = RandomWeights(decoder_parts(config, shard_of(group)), torch.bfloat16, device)
    return build_decoder(config, weights, device, options, group)
