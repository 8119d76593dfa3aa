"""Figures of the engine: of one step, and live."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StepReport:
    """What one step did.

    Attributes:
        duration_s: from plan to commit.
        num_rows: rows of the forward.
        num_rounds: sequences that drew tokens.
        num_committed: tokens committed.
        num_drafted: draft nodes verified.
        num_accepted: draft nodes accepted.
        num_preempted: sequences that lost their pages.
    """

    duration_s: float
    num_rows: int
    num_rounds: int
    num_committed: int
    num_drafted: int
    num_accepted: int
    num_preempted: int


@dataclass(frozen=True, slots=True)
class EngineGauges:
    """Live figures; free + cached + held pages are all pages."""

    num_waiting: int
    num_running: int
    num_pages: int
    num_free_pages: int
    num_cached_pages: int
    num_held_pages: int
