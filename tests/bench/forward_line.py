"""Forwards of one model on one GPU: rows of a table, and what they say of the aims."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tests.bench.aims import figure
from tests.bench.figure import Figure


@dataclass(frozen=True, slots=True)
class Line:
    """One row of the table.

    Attributes:
        free_ms: time of the same forward by whichever products are fastest; None where these are.
    """

    name: str
    time_ms: float
    floor_ms: float
    note: str = ""
    free_ms: float | None = None

    def __str__(self) -> str:
        share = f"{self.floor_ms / self.time_ms:.0%}"
        return f"| {self.name} | {self.time_ms:.2f} | {self.floor_ms:.2f} | {share} | {self.note} |"


@dataclass(frozen=True, slots=True)
class Company:
    """Whether a row's logits in this company have the bits that they have alone."""

    name: str
    is_same: bool

    def __str__(self) -> str:
        return f"{self.name}: {'same' if self.is_same else 'other'} bits"


def verification_figure(plain: Line, verification: Line) -> Figure:
    """Returns the time of a verification of 32 nodes over that of a plain step."""
    return figure(
        "verification of 32 nodes over a plain step, batch 1",
        verification.time_ms / plain.time_ms,
        verification.floor_ms / plain.time_ms,
        f"{verification.time_ms:.2f} ms",
    )


def prefill_figure(line: Line) -> Figure:
    """Returns the time of the prefill; its floor has the rate of a large product."""
    return figure("prefill of 8 × 2,048 tokens", line.time_ms, line.floor_ms, line.note)


def same_bits_figure(found: Sequence[Company]) -> Figure:
    """Returns how often bits stay."""
    share = sum(each.is_same for each in found) / len(found)
    return figure("same bits, alone and in company", 100.0 * share, note=f"{len(found)} cases")


def steady_figure(steady: Sequence[Line]) -> Figure:
    """Returns what the forward costs that pays most for the bits of its rows."""
    costs = [
        (line.time_ms / line.free_ms, line.floor_ms / line.free_ms, line.name)
        for line in steady
        if line.free_ms is not None
    ]
    return figure("cost of the same bits, steps of more rows", *max(costs))
