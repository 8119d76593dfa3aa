"""What the GPU engine aims at, and which program of this folder measures it."""

from __future__ import annotations

import math
from dataclasses import dataclass

from shared.tokens import TreeShape
from tests.bench.figure import Figure


@dataclass(frozen=True, slots=True)
class Aim:
    """A figure that is wanted; without `bound` and `floor_share` it is to be measured only.

    Attributes:
        program: of `tests.bench`, which measures it.
        more_is_better: else less is.
        bound: in `unit`.
        floor_share: least share of what the floor allows, in place of a bound.
    """

    name: str
    program: str
    unit: str
    more_is_better: bool = False
    bound: float | None = None
    floor_share: float | None = None

    def __str__(self) -> str:
        if self.floor_share is not None:
            return f"≥ {self.floor_share:.0%} of the floor"
        if self.bound is None:
            return "–"
        return f"{'≥' if self.more_is_better else '≤'} {self.bound:g} {self.unit}"

    def share(self, figure: Figure) -> float | None:
        """Returns how much of what its floor allows a figure is; None without a floor."""
        if figure.floor is None:
            return None
        return self._better(figure.measured, figure.floor)

    def ratio(self, figure: Figure) -> float | None:
        """Returns how far a figure reaches, 1 and more where the aim is reached; None where there
        is nothing to reach, or nothing to hold it against."""
        if self.floor_share is not None:
            share = self.share(figure)
            return None if share is None else share / self.floor_share
        return None if self.bound is None else self._better(figure.measured, self.bound)

    def _better(self, measured: float, reference: float) -> float:
        """Returns how many times as good the one is as the other."""
        if self.more_is_better:
            return measured / reference
        # What is measured as a difference can be nothing, or less.
        return reference / measured if measured > 0.0 else math.inf


def shape_name(shape: TreeShape) -> str:
    """Returns what aims call drafts of this shape."""
    if shape.topk == 1:
        return f"chain of {shape.num_steps}"
    return f"tree of {shape.num_draft_tokens}"


def figure(name: str, measured: float, floor: float | None = None, note: str = "") -> Figure:
    """Returns a figure of the aim of this name, which must be one."""
    return Figure(name, measured, AIMS[name].unit, floor, note)


_PLAIN = (
    Aim("plain decode, batch 1", "engine_gpu", "tokens/s", more_is_better=True, floor_share=0.90),
    Aim("plain decode, batch 64", "engine_gpu", "tokens/s", more_is_better=True, floor_share=0.85),
    Aim("verification of 32 nodes over a plain step, batch 1", "gpu", "×", bound=1.10),
    Aim("prefill of 8 × 2,048 tokens", "gpu", "ms", floor_share=0.55),
)
_ROUNDS = (
    ("chain of 5, batch 1", 5.3),
    ("tree of 32, batch 1", 5.8),
    ("chain of 5, batch 8", None),
    ("tree of 32, batch 8", 8.0),
)
_DRAFTED = (
    *(Aim(f"EAGLE-3 round alone, {name}", "gpu", "ms", bound=bound) for name, bound in _ROUNDS),
    *(Aim(f"EAGLE-3 round served, {name}", "wide", "ms", bound=bound) for name, bound in _ROUNDS),
    *(
        Aim(f"host between rounds, {name}, batch 1", "gpu", "µs", bound=50.0)
        for name in ("chain of 5", "tree of 32")
    ),
    *(
        Aim(f"adaptive over plain, batch {batch}", "wide", "×", more_is_better=True, bound=1.0)
        for batch in (1, 8, 32, 64)
    ),
    *(
        Aim(
            f"accepted length × rounds over plain, {name}, batch 1",
            "wide",
            "×",
            more_is_better=True,
            bound=2.5,
        )
        for name in ("chain of 5", "tree of 32")
    ),
)
_SAME = (
    Aim("same answers, widened and small model", "wide", "%", more_is_better=True, bound=100.0),
    Aim("same bits, alone and in company", "gpu", "%", more_is_better=True, bound=100.0),
    Aim("cost of the same bits, products up to 64 rows", "products", "×", bound=1.03),
    Aim("cost of the same bits, steps of more rows", "gpu", "×", bound=1.03),
)
_OTHERS = (
    Aim("start to the first token", "start", "s"),
    Aim("TP 2 over one GPU, batch 1", "tensor_parallel", "×", more_is_better=True, bound=1.6),
    *(
        Aim(
            f"EAGLE-3 over plain, TP 2, batch {batch}",
            "tensor_parallel",
            "×",
            more_is_better=True,
            bound=bound,
        )
        for batch, bound in ((1, 3.0), (8, 2.2))
    ),
)

AIMS = {aim.name: aim for aim in (*_PLAIN, *_DRAFTED, *_SAME, *_OTHERS)}
