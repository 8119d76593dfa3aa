"""The trace of one round of one sequence, for display. Plain data; no torch."""

from __future__ import annotations

from dataclasses import dataclass

from shared.tokens import TokenTree


@dataclass(frozen=True, slots=True)
class DraftAnswer:
    """The draft that proposed a round's candidates, and its response time.

    Attributes:
        algorithm: of the draft that has the sequence.
        response_s: from the verdict before to their arrival; 0 when they were pushed ahead; None
            when there are none, and for the first, which wait for the draft to read the prompt.
    """

    algorithm: str
    response_s: float | None


@dataclass(frozen=True, slots=True)
class RoundTrace:
    """One round. The rounds of a sequence follow each other: wait, verify, wait, verify, …

    Attributes:
        tree: as it was verified; empty when the step ran without.
        accepted_nodes: nodes of `tree` that were committed, the root's child first.
        num_rows: rows in the forward, uncomputed committed tokens and nodes.
        verify_s: from the plan of the step to its verdict.
        wait_s: from the verdict before, or from leaving the queue, to that plan.
        draft: None when no draft has the sequence.
    """

    round: int
    tree: TokenTree
    accepted_nodes: tuple[int, ...]
    num_rows: int
    verify_s: float
    wait_s: float
    draft: DraftAnswer | None
