"""Forwards of one layer at a time of a head that has several, for many sequences."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from services.draft.drafters.head_contexts import HeadContexts
from services.draft.drafters.layer_rows import LayerRows
from services.draft.sequence import DraftSequence
from shared.kv.batch import SequenceRows, build_batch
from shared.kv.upload import uploaded_numbers
from shared.runtime.head_runner import HeadRunner


class LayerForwards:
    """See `layer_rows` for what the rows of a layer are."""

    def __init__(self, runner: HeadRunner, contexts: HeadContexts) -> None:
        self._runner = runner
        self._contexts = contexts

    @property
    def num_layers(self) -> int:
        return len(self._runner.head.layers)

    def run(self, rows: Sequence[SequenceRows], hidden: Tensor, layer: int) -> Tensor:
        """Returns the states `[T, H]` of all rows."""
        runner = self._runner
        batch = build_batch(rows, page_size=runner.page_size, device=runner.device)
        return runner.states(batch, hidden, layer=layer)

    def logits(self, states: Tensor) -> Tensor:
        """Returns `[L, V]` float32 for `states` `[L, H]`."""
        return self._runner.logits(states)

    def take_over(
        self,
        sequences: Sequence[LayerRows],
        states: Tensor,
        before: Sequence[SequenceRows],
        layer: int,
    ) -> Tensor:
        """Returns what each of the rows of `layer` reads.

        Args:
            states: `[T, H]` that the layer before left on its rows, `before`.
        """
        index, start = list[int](), 0
        for own, rows in zip(sequences, before, strict=True):
            index += [start + row for row in own.sources(layer)]
            start += len(rows.token_ids)
        return self.pick(states, index)

    def root_states(
        self,
        sequences: Sequence[LayerRows],
        states: Tensor,
        rows: Sequence[SequenceRows],
        layer: int,
    ) -> Tensor:
        """Returns the states `[S, H]` of the last committed rows, `rows` being all of the layer."""
        index, start = list[int](), 0
        for own, each in zip(sequences, rows, strict=True):
            index.append(start + own.num_committed(layer) - 1)
            start += len(each.token_ids)
        return self.pick(states, index)

    def beam_states(
        self, sequences: Sequence[LayerRows], states: Tensor, rows: Sequence[SequenceRows]
    ) -> Tensor:
        """Returns the states `[S * K, H]` of the last beam's rows, which come last."""
        index, end = list[int](), 0
        for own, each in zip(sequences, rows, strict=True):
            end += len(each.token_ids)
            index += range(end - len(own.paths), end)
        return self.pick(states, index)

    def pick(self, states: Tensor, rows: Sequence[int]) -> Tensor:
        """Returns the states of some rows, counted over all sequences."""
        return states.index_select(0, uploaded_numbers(rows, self._runner.device))

    def settle(self, sequence: DraftSequence, count: int) -> None:
        """Counts rows that all layers have computed for good."""
        self._contexts.kv_of(sequence).num_computed += count
        self._contexts.drop_features(sequence)
