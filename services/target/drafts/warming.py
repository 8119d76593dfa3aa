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
        has_ended = not is_warming and self._since_s is not None
        if is_warming and self._since_s is None:
            self._since_s = now_s
        elif not is_warming and self._since_s is not None:
            self._until_s = min(now_s, self._since_s + LONGEST_S)
            self._since_s = None
        return has_ended

    def is_on(self, now_s: float) -> bool:
        """Whether it prepares something now."""
        return self._since_s is not None and now_s < self._since_s + LONGEST_S

    def was_on(self, since_s: float, now_s: float) -> bool:
        """Whether it has prepared something at any time from then until now."""
        last_s = -math.inf if self._since_s is None else min(self._since_s + LONGEST_S, now_s)
        return self.is_on(now_s) or max(last_s, self._until_s) > since_s
