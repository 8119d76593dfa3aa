"""First part of a speculative round: the head takes in what was committed and grows the trees."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shared.kv.batch import ForwardBatch
from shared.kv.pool import KvPool
from shared.models.heads.head import DraftHead
from shared.runtime.plain_growth import PlainGrowth, plain_scores
from shared.runtime.round_batches import RoundBatches, RoundTree
from shared.runtime.round_sampling import RoundSampling
from shared.runtime.round_state import RoundState
from shared.runtime.tree_draft import Growth, KnownLevel, Scores, grown

Level = Callable[[ForwardBatch, Tensor, Tensor | None, Tensor | None], tuple[Tensor, Tensor]]
Logits = Callable[[Tensor], Tensor]


class HeadForwards:
    """See `Forwards`: each level reads the states of the one before.

    Args:
        level, logits: see `RoundDraft`.
        hidden: `[any, H]`, what the open rows read.
        sources: `[R]` int64, the row of `hidden` that each of them reads; None takes them in order.
        keeps_states: those of all levels, not of the last alone.
    """

    def __init__(
        self,
        level: Level,
        logits: Logits,
        batch: ForwardBatch,
        hidden: Tensor,
        sources: Tensor | None,
        *,
        keeps_states: bool,
    ) -> None:
        self._level, self._logits = level, logits
        self._batch, self._hidden, self._sources = batch, hidden, sources
        self._keeps_states, self._kept = keeps_states, list[Tensor]()
        self._num_slots = len(batch.logit_rows)

    def first(self) -> Tensor:
        """See `Forwards.first`."""
        return self._logits(self._open())

    def next(self, batch: ForwardBatch, parents: Tensor) -> Tensor:
        """See `Forwards.next`."""
        return self._logits(self._advance(batch, parents, None))

    def walk(self, levels: Iterable[KnownLevel]) -> Sequence[Tensor]:
        """See `Forwards.walk`. The matrix of the vocabulary is the largest, and read once."""
        read = [self._open(), *(self._advance(*level, None) for level in levels)]
        return torch.split(self._logits(torch.cat(read)), [len(rows) for rows in read])

    def states(self) -> Tensor:
        """See `Forwards.states`."""
        levels = [each.view(self._num_slots, -1, each.shape[1]) for each in self._kept]
        return torch.cat(levels, dim=1)

    def _open(self) -> Tensor:
        return self._advance(self._batch, self._sources, self._batch.logit_rows)

    def _advance(
        self, batch: ForwardBatch, sources: Tensor | None, wanted: Tensor | None
    ) -> Tensor:
        """Computes a level; returns what its logits read."""
        self._hidden, read = self._level(batch, self._hidden, sources, wanted)
        if self._keeps_states:
            self._kept.append(self._hidden)
        return read


@dataclass(frozen=True, slots=True, eq=False)
class RoundDraft:
    """Drafts for all slots of a state, in plain torch. See `DraftCode`.

    Attributes:
        pool: the head's; its pages are as large as the target's.
        source_rows: what open rows read beside tokens: the target's features `[num_slots, W]` of
            each slot of the target's pool, or of any rows where the target is elsewhere.
        reads_states: they are states `[any, H]` of the head's own instead.
    """

    head: DraftHead
    pool: KvPool
    batches: RoundBatches
    source_rows: Tensor
    reads_states: bool = False

    def grow(self, state: RoundState, sampling: RoundSampling) -> RoundTree:
        """Computes the open rows and returns the trees that grow from the last of them."""
        batch, feature_slots = self.open_rows(state)
        return grown(self, state, sampling, batch, feature_slots)

    def seen(self, state: RoundState) -> RoundState:
        """See `DraftCode.seen`."""
        return state

    def open_rows(self, state: RoundState) -> tuple[ForwardBatch, Tensor]:
        """See `DraftCode.open_rows`."""
        return self.batches.of_open_rows(state)

    def forwards(self, batch: ForwardBatch, sources: Tensor, *, keeps_states: bool) -> HeadForwards:
        """See `DraftCode.forwards`."""
        rows = self.source_rows
        if rows.is_contiguous() and (self.reads_states or self.head.reads_rows(rows)):
            return self._forwards(batch, rows, sources, keeps_states=keeps_states)
        rows = rows.index_select(0, sources)
        hidden = rows if self.reads_states else self.head.fuse(rows)
        return self._forwards(batch, hidden, None, keeps_states=keeps_states)

    def scores(self, state: RoundState, sampling: RoundSampling, num_choices: int) -> Scores:
        """See `DraftCode.scores`."""
        return plain_scores(state, self.batches, sampling, num_choices)

    def growth(self, state: RoundState, sampling: RoundSampling, num_choices: int) -> Growth:
        """See `DraftCode.growth`."""
        scores = plain_scores(state, self.batches, sampling, num_choices)
        return PlainGrowth(state, self.batches, scores)

    def kind_of(self, sampling: RoundSampling) -> RoundSampling:
        """See `DraftCode.kind_of`."""
        return sampling

    def level(
        self, batch: ForwardBatch, hidden: Tensor, sources: Tensor | None, wanted: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Returns states `[R, H]` of the wanted rows, None being all, and what their logits read.

        Args:
            sources: the row of `hidden` that each row reads; None is its own.
        """
        read = hidden if sources is None else hidden.index_select(0, sources)
        states = self.head.forward(batch, read, self.pool)
        states = states if wanted is None else states.index_select(0, wanted)
        return states, states

    def logits(self, read: Tensor) -> Tensor:
        """Returns logits `[R, any]` of what levels return for that."""
        return self.head.logits(read)

    def _forwards(
        self, batch: ForwardBatch, hidden: Tensor, sources: Tensor | None, *, keeps_states: bool
    ) -> HeadForwards:
        return HeadForwards(
            self.level, self.logits, batch, hidden, sources, keeps_states=keeps_states
        )
