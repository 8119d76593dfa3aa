"""Decoders of random weights, which cost what trained ones cost."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from shared.model_options import ModelOptions
from shared.models.config import ModelConfig
from shared.models.decoder import Decoder
from shared.models.decoder_weights import decoder_parts
from shared.models.loader import build_decoder
from shared.models.weights import WeightPart, empty_targets

# Keeps activations in range.
_DEVIATION = 0.02


class RandomWeights(dict[str, Tensor]):
    """Weights that are drawn when they are taken out, so that no more of them than one are held
    beside what a loader has made of the others."""

    def __init__(
        self, parts: Sequence[WeightPart], dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__(empty_targets(parts, dtype, torch.device("meta")))
        self._device = device
        self._generator = torch.Generator(device).manual_seed(0)

    def pop(self, name: str, default: Tensor | None = None) -> Tensor | None:  # type: ignore[override]
        if name not in self:
            return default
        shape = super().pop(name)
        weight = torch.empty(shape.shape, dtype=shape.dtype, device=self._device)
        is_norm = shape.dim() == 1 and "norm" in name
        return weight.normal_(1.0 if is_norm else 0.0, _DEVIATION, generator=self._generator)


def random_decoder(
    config: ModelConfig,
    device: torch.device,
    options: ModelOptions = ModelOptions(),  # noqa: B008 - frozen
) -> Decoder:
    """Returns a decoder of normal weights in bfloat16."""
    weights = RandomWeights(decoder_parts(config), torch.bfloat16, device)
    return build_decoder(config, weights, device, options)
