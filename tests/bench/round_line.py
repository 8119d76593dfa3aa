"""Speculative rounds alone on one GPU: rows of a table, and what they say of the aims."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from shared.tokens import TreeShape
from tests.bench.aims import AIMS, figure, shape_name
from tests.bench.figure import Figure

HEADER = (
    "| round | ms | draft ms | its floor | verification ms | its floor | gap us | tokens/s |\n"
    "|---|---|---|---|---|---|---|---|"
)


@dataclass(frozen=True, slots=True)
class RoundLine:
    """One kind of round.

    Attributes:
        gap_us: what the host adds to a round.
        num_tokens: that a round commits, of all sequences together.
    """

    tree: TreeShape
    batch: int
    temperature: float
    round_ms: float
    draft_ms: float
    draft_floor_ms: float
    verification_ms: float
    verification_floor_ms: float
    gap_us: float
    num_tokens: float

    @property
    def name(self) -> str:
        tree = self.tree
        shape = shape_name(tree)
        if tree.topk > 1:
            shape = f"tree {tree.num_steps} × {tree.topk}, {tree.num_draft_tokens} tokens"
        drawn = f", temperature {self.temperature:g}" if self.temperature else ""
        return f"{shape}, batch {self.batch}{drawn}"

    def __str__(self) -> str:
        return (
            f"| {self.name} | {self.round_ms:.2f} | {self.draft_ms:.2f} "
            f"| {self.draft_floor_ms:.2f} | {self.verification_ms:.2f} "
            f"| {self.verification_floor_ms:.2f} | {self.gap_us:.0f} "
            f"| {1e3 * self.num_tokens / self.round_ms:,.0f} |"
        )

    def figures(self) -> Iterator[Figure]:
        """Yields what a greedy round takes, and what the host adds to it; see `aims`."""
        if self.temperature:
            return
        name = f"{shape_name(self.tree)}, batch {self.batch}"
        floor_ms = self.draft_floor_ms + self.verification_floor_ms
        yield figure(f"EAGLE-3 round alone, {name}", self.round_ms, floor_ms)
        if f"host between rounds, {name}" in AIMS:
            yield figure(f"host between rounds, {name}", self.gap_us)
