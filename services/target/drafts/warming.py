"""A draft that prepares what it needs once, such as CUDA graphs, by its own word. No torch.

Its trees are late meanwhile, so nobody waits for them, and how late they are counts for nothing.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

LONGEST_S = 5.0
"""A draft that says for longer that it prepares something is taken for a late one. Kernels that are
compiled for the first time take seconds."""


@dataclass(slots=True)
class Warming:
    """Of one attachment."""

    _since_s: float | None = None
    _until_s: float = -math.inf

    def told(self, now_s: float, *, is_warming: bool) -> bool:
        """The draft says whether it prepares something; returns whether that has ended."""
        since_s = self._since_s
        self._since_s = (now_s if since_s is None else since_s) if is_warming else None
        if is_warming or since_s is None:
            return False
        self._until_s = min(now_s, since_s + LONGEST_S)
        return True

    def is_on(self, now_s: float) -> bool:
        """Whether it prepares something now."""
        return self._since_s is not None and now_s < self._since_s + LONGEST_S

    def was_on(self, since_s: float, now_s: float) -> bool:
        """Whether it has prepared something at any time from then until now."""
        last_s = -math.inf if self._since_s is None else min(self._since_s + LONGEST_S, now_s)
        return self.is_on(now_s) or max(last_s, self._until_s) > since_s
