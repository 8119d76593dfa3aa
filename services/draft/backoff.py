"""The delay before the next dial."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

_MAX_DOUBLINGS = 32


@dataclass(slots=True)
class Backoff:
    """Doubling delays, with jitter so that drafts do not dial in lockstep."""

    first_s: float = 0.1
    longest_s: float = 5.0
    generator: random.Random = field(default_factory=random.Random)
    _num_failures: int = 0

    def reset(self) -> None:
        """The last attempt succeeded."""
        self._num_failures = 0

    def next_s(self) -> float:
        """Returns between half and all of `first_s * 2^failures`, at most `longest_s`."""
        delay_s = min(self.first_s * 2.0**self._num_failures, self.longest_s)
        self._num_failures = min(self._num_failures + 1, _MAX_DOUBLINGS)
        return delay_s * self.generator.uniform(0.5, 1.0)

    def slow_s(self) -> float:
        """Returns the delay after a refusal that only an operator can mend."""
        return self.longest_s * self.generator.uniform(0.5, 1.0)
