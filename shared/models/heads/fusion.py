"""From several hidden states of the target to the one a head reads."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from shared.layers.linear import Linear
from shared.layers.norm import RmsNorm


@dataclass(frozen=True, slots=True)
class FeatureFusion:
    """`fc` behind EAGLE-3.1's norms, on the draft's side; without norms the target applies `fc`.

    Attributes:
        joint_norm: over the concatenation of the K layers.
        layer_norms: one a layer, or none.
        fc: `K * H_target` to `H`.
    """

    joint_norm: RmsNorm | None
    layer_norms: tuple[RmsNorm, ...]
    fc: Linear

    def __call__(self, rows: Tensor) -> Tensor:
        """`[R, K * H_target]` to `[R, H]`."""
        if self.joint_norm is not None:
            rows = self.joint_norm(rows)
        if self.layer_norms:
            parts = rows.chunk(len(self.layer_norms), dim=-1)
            pairs = zip(self.layer_norms, parts, strict=True)
            rows = torch.cat([norm(part) for norm, part in pairs], dim=-1)
        return self.fc(rows)
