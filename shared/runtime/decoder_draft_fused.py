"""`DecoderDraft` on CUDA: what follows a level's logits in two launches."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from shared.kv.batch import ForwardBatch
from shared.runtime.decoder_draft import DecoderDraft
from shared.runtime.fused_code import FusedCode


@dataclass(frozen=True, slots=True, eq=False)
class FusedDecoderDraft(FusedCode, DecoderDraft):
    """Every token of its own is the target's."""

    def logits(self, batch: ForwardBatch) -> Tensor:
        """See `DecoderDraft.logits`."""
        hidden = self.decoder.forward(batch, self.pool).hidden
        # The kernels read any float type.
        return self.decoder.logits(hidden.index_select(0, batch.logit_rows), self.decoder.dtype)
