"""A change of weights, as targets tell it to gateways."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class WeightChange:
    """Other weights came into force.

    Attributes:
        time_s: seconds since the epoch.
        algorithm: of the draft that has them; empty for the target.
    """

    time_s: float
    algorithm: str
    version: str
