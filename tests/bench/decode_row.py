"""Plain decode by the engine: a row of a table, and what it says of the aims."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from tests.bench.aims import AIMS, figure
from tests.bench.figure import Figure

HEADER = (
    "| batch | overlap | tokens/s | step ms | device ms | beyond it, us | host gap, us "
    "| floor ms | of floor | tokens/s with prefill | same tokens |\n"
    "|---|---|---|---|---|---|---|---|---|---|---|"
)


@dataclass(frozen=True, slots=True)
class DecodeRow:
    """One mode at one batch size.

    Attributes:
        overlaps: the engine launches a step before it has read the one before.
        device_ms: of a step's forward and argmax alone.
        gap_us: as the engine reports it.
        whole_tokens_per_s: from submission on, prompts included.
        num_same: sequences with the same tokens in both modes.
    """

    batch: int
    overlaps: bool
    step_ms: float
    device_ms: float
    gap_us: float
    floor_ms: float
    whole_tokens_per_s: float
    num_same: int

    def __str__(self) -> str:
        return (
            f"| {self.batch} | {'on' if self.overlaps else 'off'} "
            f"| {1e3 * self.batch / self.step_ms:,.0f} | {self.step_ms:.3f} "
            f"| {self.device_ms:.3f} | {1e3 * (self.step_ms - self.device_ms):.0f} "
            f"| {self.gap_us:.0f} | {self.floor_ms:.3f} | {self.floor_ms / self.step_ms:.1%} "
            f"| {self.whole_tokens_per_s:,.0f} | {self.num_same}/{self.batch} |"
        )

    def figures(self) -> Iterator[Figure]:
        """Yields what the engine decodes as it is served; see `aims`."""
        name = f"plain decode, batch {self.batch}"
        if self.overlaps and name in AIMS:
            rate, floor = (1e3 * self.batch / ms for ms in (self.step_ms, self.floor_ms))
            yield figure(name, rate, floor, f"{self.step_ms:.2f} ms")
