"""From a head's states to scores of the target's tokens."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

from shared.layers.linear import Linear
from shared.layers.norm import RmsNorm


@dataclass(frozen=True, slots=True)
class DraftVocabulary:
    """The tokens a head can propose.

    Attributes:
        norm: before the lm_head; None in heads without one.
        lm_head: `H` to Vd.
        token_ids: `[Vd]` int64, the target's id of each draft id; None when they are the same.
        vocab_size: V, of the target.
        size: Vd.
    """

    norm: RmsNorm | None
    lm_head: Linear
    token_ids: Tensor | None
    vocab_size: int
    size: int

    def logits(self, states: Tensor) -> Tensor:
        """Returns `[L, V]` float32 for `states` `[L, H]`; -inf for tokens without a draft id."""
        own = self.lm_head(states if self.norm is None else self.norm(states)).float()
        if self.token_ids is None:
            return own
        logits = own.new_full((len(own), self.vocab_size), -math.inf)
        return logits.index_copy_(1, self.token_ids, own)
