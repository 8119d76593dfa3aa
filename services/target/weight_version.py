"""The version of the weights in force."""

from __future__ import annotations

from dataclasses import dataclass

FIRST_VERSION = "default"
"""The version of the weights that a process has started with."""


@dataclass(slots=True)
class WeightVersion:
    """The name of the weights in force. Not frozen: an update replaces it.

    Attributes:
        num_updates: since the start.
    """

    name: str = FIRST_VERSION
    num_updates: int = 0
