"""The hidden states of the target that a draft head reads."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class FeatureSpec:
    """The features that the target computes at each position for a draft.

    Attributes:
        layer_indices: with n layers, i < n is the residual stream that enters layer i, n the
            output of the last layer before the final norm, n + 1 that output after it. Several
            are concatenated on the last axis.
        projection: `[width, K * H]`; the target applies it to the concatenation of K layers, so
            that rows are narrower. None sends the concatenation.
    """

    layer_indices: tuple[int, ...]
    dtype: torch.dtype
    width: int
    projection: Tensor | None = None

    @property
    def layer_width(self) -> int:
        """Width of the concatenated layers, before the projection."""
        return self.width if self.projection is None else self.projection.shape[1]

    def projected(self, rows: Tensor) -> Tensor:
        """Projects rows `[R, layer_width]` to `[R, width]`; returns projected rows unchanged."""
        if self.projection is None or rows.shape[1] == self.width:
            return rows
        return rows.to(self.projection) @ self.projection.T


def output_of(layer: int, num_layers: int) -> int:
    """Returns the layer index, as `FeatureSpec` counts, of the output of `layer` as transformers
    lists it in `hidden_states`: after the final norm if the layer is the last one."""
    return layer + 1 if layer + 1 < num_layers else num_layers + 1
