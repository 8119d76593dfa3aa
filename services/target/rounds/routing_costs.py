"""Extra time of a mixture's step whose sequences differ, over one whose sequences are equal.

Steps are measured at start with nobody in them: all sequences are alike, and hit the experts of
one. Those of requests differ, hit more experts, and read more weights.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from shared.kv.decode_batch import empty_decode_batch
from shared.runtime.runner import ModelRunner

# Spreads neighbouring numbers over a vocabulary; a prime.
_SPREAD = 7919


@dataclass(frozen=True, slots=True)
class RoutingCosts:
    """Owned by the engine thread.

    Attributes:
        timed: returns the seconds of a step.
    """

    runner: ModelRunner
    timed: Callable[[Callable[[], object]], float]

    def extra_s(self, num_sequences: int, rows_each: int) -> float:
        """Returns the seconds by which sequences that differ take longer; 0 of a dense model.

        Args:
            rows_each: rows of a sequence, which differ anyway.
        """
        if self.runner.decoder.config.experts is None or num_sequences == 1:
            return 0.0
        num_rows = num_sequences * rows_each
        rows = torch.arange(num_rows, device=self.runner.device)
        different_s, alike_s = (self._step_s(tokens) for tokens in (rows, rows % rows_each))
        return max(0.0, different_s - alike_s)

    def _step_s(self, numbers: torch.Tensor) -> float:
        """Returns the seconds of a plain step whose tokens follow from numbers."""
        runner = self.runner
        batch = empty_decode_batch(len(numbers), runner.page_size, runner.device)
        tokens = numbers * _SPREAD % runner.decoder.config.vocab_size
        varied = replace(batch, token_ids=tokens)
        return self.timed(lambda: runner.run(varied))
