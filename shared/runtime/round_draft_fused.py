"""`RoundDraft` on CUDA: a level of the tree in a dozen launches."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from shared.kernels.partials import total_of
from shared.kv.batch import ForwardBatch
from shared.layers.attention import ForwardContext, plan_for
from shared.models.heads.layers import HeadRows, SplitHeadLayer
from shared.runtime.fused_code import FusedCode
from shared.runtime.round_draft import RoundDraft


@dataclass(frozen=True, slots=True, eq=False)
class FusedRoundDraft(FusedCode, RoundDraft):
    """A head's norms and sums are parts of its kernels."""

    def level(
        self, batch: ForwardBatch, hidden: Tensor, sources: Tensor | None, wanted: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """See `RoundDraft.level`."""
        head, layer = self.head, self.head.layers[0]
        assert isinstance(layer, SplitHeadLayer)
        rows = HeadRows(batch.token_ids, head.embedding, hidden, sources)
        stream, update = layer.advance(rows, self._context(batch))
        norm = layer.state_norm or head.vocabulary.norm
        if norm is None:
            states = stream + total_of(update)
            states = states if wanted is None else states.index_select(0, wanted)
            return states, states
        states, normed = norm.add(stream, update, wanted)
        return states if layer.state_norm is None else normed, normed

    def logits(self, read: Tensor) -> Tensor:
        """See `RoundDraft.logits`; over the head's own vocabulary."""
        return self.head.vocabulary.lm_head(read)

    def _context(self, batch: ForwardBatch) -> ForwardContext:
        head = self.head
        shape = head.layers[0].attention.shape
        plans = {shape.sliding_window: plan_for(batch, shape, head.attention_backend)}
        return ForwardContext(batch, self.pool, *head.rotary.tables(batch.positions), plans)

    @property
    def _token_map(self) -> Tensor | None:
        return self.head.vocabulary.token_ids
