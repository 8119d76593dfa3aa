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
        self,
        hidden: Tensor | Part,
        update: Tensor | Partials | Part | None,
        rows: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Returns `hidden + update` and its norm, `[T, D]` each; `hidden` alone without an update.

        Args:
            hidden, update: one of the two may be this process's part of a sum over a group.
            rows: `[T]` int64, the rows to compute; None takes all. Not with a part of a sum.
        """
        if isinstance(hidden, Part):
            assert update is None
            assert rows is None
            return hidden.group.add_norm(hidden.values, None, self.weight, self.eps)
        if isinstance(update, Part):
            assert rows is None
            return update.group.add_norm(update.values, hidden, self.weight, self.eps)
        return add_rms_norm(hidden, update, self.weight, self.eps, rows)
