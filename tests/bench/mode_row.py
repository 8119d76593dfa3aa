"""One row of a table of modes: the whole engine, plain or with drafts, at one batch size."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from shared.tokens import TreeShape
from tests.bench.aims import AIMS, figure, shape_name
from tests.bench.figure import Figure
from tests.bench.wide_engine import Run

ON_DEVICE = "EAGLE3, rounds on the device"
CHOSEN = "EAGLE3, rounds or plain steps as chosen"
HEADER = (
    "mode", "batch", "tok/s", "vs plain", "tokens a round", "ms", "floor ms", "of floor", "same",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class ModeRow:
    """What a mode came to.

    Attributes:
        shape: of its drafts; None without.
        over_plain: its tokens a second over those of plain decoding.
        tokens_a_round: committed, bonus included.
        floor_ms: of a round; 0 where there is no GPU to measure it on.
        num_same: answers that equal those of plain decoding, token for token.
    """

    mode: str
    shape: TreeShape | None
    batch: int
    tokens_per_s: float
    over_plain: float
    tokens_a_round: float
    round_ms: float
    floor_ms: float
    num_same: int

    @classmethod
    def of(
        cls,
        mode: str,
        shape: TreeShape | None,
        run: Run,
        floor_ms: float,
        *,
        base: Run,
        plain: Run,
    ) -> ModeRow:
        """Returns the row of a run.

        Args:
            base: whose speed it is held against.
            plain: whose answers it is held against.
        """
        same = sum(left == right for left, right in zip(run.answers, plain.answers, strict=True))
        return cls(
            mode,
            shape,
            len(run.answers),
            run.tokens_per_s,
            run.tokens_per_s / base.tokens_per_s,
            run.tokens_a_round,
            run.round_ms,
            floor_ms,
            same,
        )

    @property
    def over_plain_at_floor(self) -> float | None:
        """What `over_plain` would be if a round took no longer than its floor."""
        return self.over_plain * self.round_ms / self.floor_ms if self.floor_ms else None

    def cells(self) -> tuple[str, ...]:
        """Returns the row as text, in the columns of `HEADER`."""
        shape = self.shape
        drafts = f" {shape.num_steps},{shape.topk},{shape.num_draft_tokens}" if shape else ""
        return (
            self.mode + drafts,
            str(self.batch),
            f"{self.tokens_per_s:,.0f}",
            f"{self.over_plain:.2f}",
            f"{self.tokens_a_round:.2f}",
            f"{self.round_ms:.2f}",
            f"{self.floor_ms:.2f}" if self.floor_ms else "–",
            f"{self.floor_ms / self.round_ms:.0%}" if self.floor_ms else "–",
            f"{self.num_same}/{self.batch}",
        )

    def figures(self) -> Iterator[Figure]:
        """Yields what the row says of rounds of trained drafts; see `aims`."""
        if self.shape is None:
            return
        found: dict[str, tuple[float, float | None]] = {}
        if self.mode == CHOSEN:
            # It is to lose nothing to plain decoding, whatever its rounds could reach.
            found[_chosen(self.batch)] = (self.over_plain, None)
        elif self.mode == ON_DEVICE:
            name = f"{shape_name(self.shape)}, batch {self.batch}"
            found[_served(self.shape, self.batch)] = (self.round_ms, self.floor_ms or None)
            over_plain = (self.over_plain, self.over_plain_at_floor)
            found[f"accepted length × rounds over plain, {name}"] = over_plain
        for name, (measured, floor) in found.items():
            if name in AIMS:
                yield figure(name, measured, floor, f"{self.tokens_a_round:.2f} tokens a round")


def has_aim(mode: str, shape: TreeShape, batch: int) -> bool:
    """Whether anything is aimed at that a mode with drafts of this shape shows."""
    names = {CHOSEN: _chosen(batch), ON_DEVICE: _served(shape, batch)}
    return names.get(mode) in AIMS


def _chosen(batch: int) -> str:
    return f"adaptive over plain, batch {batch}"


def _served(shape: TreeShape, batch: int) -> str:
    return f"EAGLE-3 round served, {shape_name(shape)}, batch {batch}"
