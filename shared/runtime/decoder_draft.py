"""A language model that drafts, for trees that are grown in one pass."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

from torch import Tensor

from shared.kv.batch import ForwardBatch
from shared.kv.pool import KvPool
from shared.models.decoder import Decoder
from shared.runtime.plain_growth import PlainGrowth, plain_scores
from shared.runtime.round_batches import RoundBatches
from shared.runtime.round_sampling import RoundSampling
from shared.runtime.round_state import LENGTH, OFFSET, RoundState
from shared.runtime.tree_draft import Growth, KnownLevel, Scores


class DecoderForwards:
    """See `Forwards`: rows read tokens alone."""

    def __init__(self, logits: Callable[[ForwardBatch], Tensor], batch: ForwardBatch) -> None:
        self._logits, self._batch = logits, batch

    def first(self) -> Tensor:
        """See `Forwards.first`."""
        return self._logits(self._batch)

    def next(self, batch: ForwardBatch, parents: Tensor) -> Tensor:
        """See `Forwards.next`."""
        return self._logits(batch)

    def walk(self, levels: Iterable[KnownLevel]) -> Iterator[Tensor]:
        """See `Forwards.walk`."""
        yield self.first()
        for level in levels:
            yield self.next(*level)

    def states(self) -> None:
        """There are none."""


@dataclass(frozen=True, slots=True, eq=False)
class DecoderDraft:
    """Drafts in plain torch. See `DraftCode`.

    A model's rows are those of a head one token later: row i reads token i. So the state counts a
    token more than are committed, and its first one is left out of the window.
    """

    decoder: Decoder
    pool: KvPool
    batches: RoundBatches

    def seen(self, state: RoundState) -> RoundState:
        """See `DraftCode.seen`."""
        numbers = state.numbers.clone()
        numbers[:, LENGTH] += 1
        numbers[:, OFFSET] -= 1
        return replace(state, numbers=numbers)

    def open_rows(self, state: RoundState) -> tuple[ForwardBatch, Tensor]:
        """See `DraftCode.open_rows`."""
        return self.batches.of_open_rows(state)

    def forwards(
        self, batch: ForwardBatch, sources: Tensor, *, keeps_states: bool
    ) -> DecoderForwards:
        """See `DraftCode.forwards`."""
        return DecoderForwards(self.logits, batch)

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

    def logits(self, batch: ForwardBatch) -> Tensor:
        """Computes rows; returns the logits of those that ask for them."""
        hidden = self.decoder.forward(batch, self.pool).hidden
        return self.decoder.logits(hidden.index_select(0, batch.logit_rows))
