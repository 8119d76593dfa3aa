"""Weights of the acceptance estimate by which a draft ranks likely verdicts. No torch.

A token's estimate is a weighted mean of its draft probability and of the measured share of tokens
of its rank that the target accepted. The first says which tokens are sure, the second how far to
trust the draft.
"""

from __future__ import annotations

MEASURED_WEIGHT = 0.5
"""Weight of the measured share in the mean."""
PRIOR_TOKENS = 8.0
"""Weight of the prior, in verified tokens: soon outweighed by measurements."""
PRIOR_SHARE = 0.5
"""Prior share of each rank in what the ranks before it leave: a geometric distribution."""
MEMORY_TOKENS = 4096.0
"""Verified tokens beyond which older ones count for less, because texts change."""
