"""Chooses the verdicts that a draft prepares for. No torch."""

from __future__ import annotations

from dataclasses import dataclass, replace

MAX_BUDGET = 64


@dataclass(frozen=True, slots=True)
class FanOut:
    """Distributes conditional candidates over possible verdicts.

    The likeliest verdicts get one each: a verdict's probability is that of the path to its node
    times that of the bonus token after it, see `RankShares`. So fan-out falls off geometrically
    along a path, and the end of a likely one gets more than the node before it: what is likeliest
    to follow there is in no tree yet.

    Attributes:
        budget: conditional candidates a sequence and round; 0 drafts after each verdict only.
        most: candidates for all sequences together, at least one each: a draft's rows are not
            free beyond a few hundred.
    """

    budget: int = 0
    most: int = 256

    def shared_by(self, num_sequences: int) -> FanOut:
        """Returns what each of that many sequences gets."""
        return replace(self, budget=min(self.budget, max(self.most // num_sequences, 1)))


SYNCHRONOUS = FanOut()
