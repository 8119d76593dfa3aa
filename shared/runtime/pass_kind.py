"""Kinds of passes of one model and shape."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PassKind:
    """The properties by which passes differ.

    Attributes:
        num_choices: see `TreeDraft`.
        is_split: it can stop after each forward. Each sequence has one open row, which comes
            behind one that a pass computed: where rows read states, it reads that one's.
        is_walk: it computes trees that are given instead of growing them.
    """

    num_choices: int = 0
    is_split: bool = False
    is_walk: bool = False
