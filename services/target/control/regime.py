"""What is known of speculation where about as many sequences decode, and what they do. No torch."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from services.target.control.choices import Freedom
from services.target.control.gain_estimate import GainEstimate

MOST_BACK_OFF = 4.0


class Stance(enum.Enum):
    """What sequences that may have drafts do."""

    OFF = enum.auto()
    """They have none."""

    PAUSED = enum.auto()
    """They stay at their drafts, but no trees are wanted."""

    ON = enum.auto()
    """Trees are wanted."""


@dataclass(slots=True)
class Regime:
    """About as many sequences that decode.

    Attributes:
        pays: whether speculation was faster beyond doubt when it was last judged.
        num_trials: life-long.
        num_failed: trials since it last did pay; clear ones count as several.
        is_put_off: its last trial ended before it could tell anything, so it is to be made again.
        num_losses: windows in a row in which speculation was slower than plain decoding.
    """

    estimate: GainEstimate
    pays: bool = False
    num_trials: int = 0
    num_failed: int = 0
    num_losses: int = 0
    is_put_off: bool = False

    @property
    def eagerness(self) -> float:
        """Share of the budget that trials may use: the less, the more of them have failed."""
        return 1.0 / min(1.0 + self.num_failed / 4, MOST_BACK_OFF)

    @property
    def freedom(self) -> Freedom:
        """What may be chosen where speculation runs: in a trial all sequences are drafted for, in
        every other one with what the draft was made for, because the best trees are only known
        where others were tried."""
        if self.pays:
            return Freedom.ANY
        return Freedom.NONE if self.num_trials % 2 else Freedom.ALL
