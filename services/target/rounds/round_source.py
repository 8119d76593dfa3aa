"""What rounds on the device use of a draft."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from shared.runtime.round_head import HeadPlace
from shared.tokens import TreeShape

MAX_ROWS = 2048
"""Rows that a round verifies at most: 256 trees of 8."""


@dataclass(frozen=True, slots=True, eq=False)
class RoundSource:
    """A head with its pages, and the shapes of its trees.

    Attributes:
        pages: those of its KV pages that are the rounds' alone.
        tree: the draft's own shape.
        max_context_tokens: longest sequence that the head can look back on.
        max_sequences: of a round with the draft's own shape.
        other_trees: further shapes that may be chosen, each with the most sequences of a round.
        is_pinned: an operator fixed the shape: at most it is chosen whether trees grow ahead.
        place: of the head among those that the target keeps rounds for.
    """

    head: HeadPlace
    pages: Sequence[int]
    tree: TreeShape
    max_context_tokens: int
    max_sequences: int
    other_trees: Mapping[TreeShape, int] = field(default_factory=dict)
    is_pinned: bool = False
    place: int = 0


def capacities(shapes: Iterable[TreeShape], max_sequences: int) -> dict[TreeShape, int]:
    """Returns the most sequences of a round with trees of each shape."""
    return {
        shape: min(max_sequences, max(MAX_ROWS // shape.num_draft_tokens, 1)) for shape in shapes
    }
