"""The choice in force for sequences that rounds on the device could take. Plain data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from shared.tokens import Choice, TreeShape


@dataclass(frozen=True, slots=True)
class RoundStanding:
    """The choice in force, with its measurements.

    Attributes:
        shape: of the rounds under way; None while there are none.
        num_drafted_for: sequences that take part.
        num_paused: sequences that step plainly because that pays more.
        probe_s: time that probes have cost.
        round_s: usual time of a step, by choice and sequences.
    """

    shape: TreeShape | None
    num_drafted_for: int
    num_paused: int
    probe_s: float
    round_s: Mapping[tuple[Choice, int], float]
