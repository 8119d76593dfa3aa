"""What speculation did in a while. Plain data."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class SpeculationCounts:
    """What speculation did since the counts were taken.

    Attributes:
        waiting_s: time that running sequences had nothing to step with.
        num_paused_rounds: rounds for which no tree was wanted.
        num_probe_rounds: rounds that were drafted for only to learn.
        num_cut_nodes: drafted nodes that were not worth their row.
        num_trials: times that speculation was tried where it was off.
        off_s: time of steps in which speculation was off, because it was not faster beyond doubt.
    """

    waiting_s: float = 0.0
    num_paused_rounds: int = 0
    num_probe_rounds: int = 0
    num_cut_nodes: int = 0
    num_trials: int = 0
    off_s: float = 0.0
