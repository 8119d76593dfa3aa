"""Senders of hidden states to a draft: in this process, in messages, or through shared memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    # Policies carry senders, and load no torch.
    from torch import Tensor

    from shared.runtime.ring_memory import FeatureRingWriter


@dataclass(frozen=True, slots=True, eq=False)
class PlacedRows:
    """Rows at the place where the draft reads them.

    Attributes:
        rows: `[R, W]`.
        ring_start: number of the first one in the draft's ring; None when they are not there.
    """

    rows: Tensor
    ring_start: int | None = None


class HiddenStateSender(Protocol):
    """Called on the engine thread.

    Attributes:
        hands_over: whether the copy is complete when `place` returns, rather than queued.
    """

    @property
    def hands_over(self) -> bool: ...

    def place(self, rows: Tensor) -> PlacedRows:
        """Puts rows `[R, W]` of the target's device where the draft can read them."""


class InProcessSender:
    """The draft is in this process: rows stay on the device."""

    hands_over = False

    def place(self, rows: Tensor) -> PlacedRows:
        return PlacedRows(rows)


class InlineSender:
    """Rows travel as bytes in messages."""

    hands_over = True

    def place(self, rows: Tensor) -> PlacedRows:
        return PlacedRows(rows.cpu())


class RingSender:
    """Rows go into memory shared with the draft, or as bytes in messages while that is full."""

    hands_over = True

    def __init__(self, ring: FeatureRingWriter) -> None:
        self._ring = ring

    def place(self, rows: Tensor) -> PlacedRows:
        start = self._ring.write(rows)
        return PlacedRows(rows.cpu()) if start is None else PlacedRows(rows, start)
