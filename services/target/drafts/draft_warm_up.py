"""The warm-up of a draft, as the draft reports it: CUDA graphs, kernels. No torch.

Its trees are late during a warm-up, so the target neither waits for them nor measures them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

LONGEST_S = 5.0
"""A longer warm-up is ignored. Kernels that are compiled for the first time take seconds."""


@dataclass(slots=True)
class DraftWarmUp:
    """The warm-up of one attachment."""

    _since_s: float | None = None
    _until_s: float = -math.inf

    def report(self, now_s: float, *, is_warming: bool) -> None:
        """Takes a report of the draft."""
        since_s = self._since_s
        self._since_s = (now_s if since_s is None else since_s) if is_warming else None
        if not is_warming and since_s is not None:
            self._until_s = min(now_s, since_s + LONGEST_S)

    def is_on(self, now_s: float) -> bool:
        """Whether a warm-up is under way."""
        return self._since_s is not None and now_s < self._since_s + LONGEST_S

    def was_on(self, since_s: float, now_s: float) -> bool:
        """Whether a warm-up was under way at any time from `since_s` until now."""
        last_s = -math.inf if self._since_s is None else min(self._since_s + LONGEST_S, now_s)
        return self.is_on(now_s) or max(last_s, self._until_s) > since_s
