"""Root-mean-square normalisation layer."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from shared.kernels.pointwise import Partials, add_rms_norm, rms_norm
from shared.layers.tensor_group import Part


@dataclass(frozen=True, slots=True)
class RmsNorm:
    """Attributes: weight `[..., D]`, broadcast against the input; eps under the root."""

    weight: Tensor
    eps: float

    def __call__(self, hidden: Tensor) -> Tensor:
        return rms_norm(hidden, self.weight, self.eps)

    def add(
        self, hidden: Tensor, update: Tensor | Partials | None, rows: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Returns `hidden + update` and its norm, `[T, D]` each; `hidden` alone without an update.

        Args:
            rows: `[T]` int64, the rows to compute; None takes all.
        """
        return add_rms_norm(hidden, update, self.weight, self.eps, rows)

    def add_parts(
        self, hidden: Tensor | Part, update: Tensor | Partials | Part | None
    ) -> tuple[Tensor, Tensor]:
        """As `add`, but one of the two may be this process's part of a sum over a group."""
        if isinstance(hidden, Part):
            assert update is None
            return hidden.group.add_norm(hidden.values, None, self.weight, self.eps)
        if isinstance(update, Part):
            return update.group.add_norm(update.values, hidden, self.weight, self.eps)
        return self.add(hidden, update)
