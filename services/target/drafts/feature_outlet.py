"""How feature rows leave the target for one draft."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    # Policies carry outlets, and load no torch.
    from torch import Tensor

    from shared.runtime.feature_ring import FeatureRingWriter


@dataclass(frozen=True, slots=True, eq=False)
class PlacedRows:
    """Rows where the draft gets them.

    Attributes:
        rows: `[R, W]`.
        ring_start: number of the first one in the draft's ring; None when they are not there.
    """

    rows: Tensor
    ring_start: int | None = None


class FeatureOutlet(Protocol):
    """Called on the engine thread.

    Attributes:
        hands_over: rows are where the draft gets them when `place` returns, not only queued.
    """

    @property
    def hands_over(self) -> bool: ...

    def place(self, rows: Tensor) -> PlacedRows:
        """Puts rows `[R, W]` of the target's device where the draft can have them."""


class InProcessOutlet:
    """The draft lives in this process: rows stay where they are."""

    hands_over = False

    def place(self, rows: Tensor) -> PlacedRows:
        return PlacedRows(rows)


class InlineOutlet:
    """Rows travel as bytes, from host memory."""

    hands_over = True

    def place(self, rows: Tensor) -> PlacedRows:
        return PlacedRows(rows.cpu())


class RingOutlet:
    """Rows lie in memory that the draft shares; as bytes they travel while there is no room."""

    hands_over = True

    def __init__(self, ring: FeatureRingWriter) -> None:
        self._ring = ring

    def place(self, rows: Tensor) -> PlacedRows:
        start = self._ring.write(rows)
        return PlacedRows(rows.cpu()) if start is None else PlacedRows(rows, start)
