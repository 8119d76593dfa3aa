"""How far a draft's confidence is believed when it ranks likely verdicts. No torch.

A draft's confidence says which of its choices are sure; what the target took before says how far to
believe it. A token's probability is a mean of the two: its own, and how often the target took the
choice of its rank.
"""

from __future__ import annotations

MEASURED_WEIGHT = 0.5
"""Weight of what the target took before."""
PRIOR_TOKENS = 8.0
"""Weight of the prior in verified tokens: enough for a start, soon outweighed."""
PRIOR_SHARE = 0.5
"""Share of each choice in what the ones before it leave: a geometric fan-out."""
MEMORY_TOKENS = 4096.0
"""Older tokens count for less, because texts change."""
