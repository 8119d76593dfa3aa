"""The values of the target's flags that choose between modes."""

from __future__ import annotations

import enum


class DeviceRoundsChoice(enum.Enum):
    """Whether rounds stay on the device where they can."""

    AUTO = "auto"
    ON = "on"
    OFF = "off"


class VerificationChoice(enum.Enum):
    """Whether draft and target share their randomness."""

    COUPLED = "coupled"
    POINT_MASS = "point-mass"


class DraftPlacement(enum.Enum):
    """Placement of drafts."""

    REMOTE = "remote"
    EMBEDDED = "embedded"


class VerificationMode(enum.Enum):
    """The rule by which trees are verified."""

    COUPLED = "coupled"
    POINT_MASS = "point-mass"
    REJECTION = "rejection"
    BLOCK = "block"

    @property
    def draws_chains(self) -> bool:
        """Whether drafts draw their chains and hand over the distributions."""
        return self in (VerificationMode.REJECTION, VerificationMode.BLOCK)
