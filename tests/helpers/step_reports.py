"""Made-up step reports."""

from __future__ import annotations

from typing import Any

from services.target.step_report import OutcomeTally, SpeculationCounts, StepReport


def step_report(**facts: Any) -> StepReport:
    """Returns the report of a plain step of one sequence that takes a second and ends at 1; `facts`
    replace fields."""
    plain: dict[str, Any] = {
        "duration_s": 1.0,
        "end_s": 1.0,
        "host_gap_s": 0.0,
        "num_rows": 1,
        "num_prompt_rows": 0,
        "num_rounds": 1,
        "num_committed": 1,
        "num_drafted": 0,
        "num_accepted": 0,
        "num_preempted": 0,
        "outcomes": OutcomeTally(),
        "num_discarded": 0,
        "speculation": SpeculationCounts(),
    }
    return StepReport(**plain | facts)
