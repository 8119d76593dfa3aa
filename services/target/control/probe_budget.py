"""How much time may be spent on finding out whether speculation pays again. No torch."""

from __future__ import annotations

from dataclasses import dataclass

PROBE_SHARE = 0.0125
"""Share of the target's time that probes may cost."""

LARGEST_CREDIT_S = 0.05
"""Unused time is not saved up beyond this."""


@dataclass(slots=True)
class ProbeBudget:
    """Earns a share of the time that passes, and pays for what probes cost beyond plain decoding.

    A probe begins only on credit above 0, so the share is exceeded by one probe at most.

    Attributes:
        spent_s: paid so far.
    """

    share: float = PROBE_SHARE
    credit_s: float = 0.0
    spent_s: float = 0.0

    @property
    def allows_probe(self) -> bool:
        return self.credit_s > 0.0

    def earn(self, elapsed_s: float) -> None:
        """Time passed."""
        most_s = max(self.credit_s, LARGEST_CREDIT_S)
        self.credit_s = min(self.credit_s + self.share * elapsed_s, most_s)

    def grant(self, credit_s: float) -> None:
        """Something new has to be learnt."""
        self.credit_s += credit_s

    def pay(self, cost_s: float) -> None:
        """A probe's round cost this much more than a plain one would have."""
        self.settle(max(cost_s, 0.0))

    def settle(self, cost_s: float) -> None:
        """A part of a trial cost this much more than plain decoding would have, or less if it is
        negative: its luck evens out."""
        self.credit_s = min(self.credit_s - cost_s, max(self.credit_s, LARGEST_CREDIT_S))
        self.spent_s += cost_s
