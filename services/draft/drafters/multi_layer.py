"""Drafts with a head of n next-token layers: level j of a tree is scored by layer min(j, n) - 1.

Layer k reads the token k further ahead than layer 0 and the state that layer k - 1 left on the
same row, as in training, so it can compute row i only when token i + 1 + k is known. The last
n - 1 committed rows therefore stay open: every proposal computes them again, in each layer those
whose tokens are known, and then the nodes of the tree on top. Beyond n levels the last layer
continues its own states.

Source: DeepSeek-V3, arXiv 2412.19437, section 2.2.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from services.draft.draft_scores import DraftScores
from services.draft.drafters.drafter import Proposal
from services.draft.drafters.eagle import EagleDrafter
from services.draft.drafters.layer_rows import LayerRows
from services.draft.sequence import DraftSequence
from shared.kv.batch import SequenceRows, build_batch
from shared.speculation.growth import Beam, TreeGrowth, choose_children, parent_states
from shared.tokens import TreeShape


class MultiLayerDrafter(EagleDrafter):
    """See `Drafter`. Its leases must not cache prefixes: a row's key there is too short for what
    the deeper layers read."""

    @property
    def foresight(self) -> None:
        """Every tree follows its verdict: open rows change with each token."""

    @property
    def _num_layers(self) -> int:
        return len(self._runner.head.layers)

    @property
    def _num_open_rows(self) -> int:
        """Every layer needs a committed row."""
        return self._num_layers

    def _take_in(self, counts: Sequence[tuple[DraftSequence, int]]) -> None:
        states = self._contexts.hidden(counts)
        for layer in range(self._num_layers):
            rows = [self._settled_rows(*each, layer=layer) for each in counts]
            states = self._compute(rows, states, layer)
        for sequence, count in counts:
            self._settle(sequence, count)

    def _grow(self, sequences: Sequence[DraftSequence], shape: TreeShape) -> list[Proposal]:
        growth, scores = TreeGrowth(shape), DraftScores(sequences, self._runner.device)
        tails = [LayerRows(self._contexts.kv_of(s), s.token_ids) for s in sequences]
        counts = [(sequence, self.backlog(sequence)) for sequence in sequences]
        rows, hidden = [tail.all_rows(0) for tail in tails], self._contexts.hidden(counts)
        states = self._compute(rows, hidden, 0)
        frontier = self._add_level(growth, scores, tails, rows, states, shape)
        # A layer without a level to score still has committed rows to settle.
        for level in range(1, max(shape.num_steps, self._num_layers)):
            layer = min(level, self._num_layers - 1)
            beam = None if growth.is_complete else _next_beam(growth, tails)
            if level == layer:
                hidden = states.index_select(0, self._sources(tails, rows, layer))
                rows = [tail.all_rows(layer) for tail in tails]
            else:
                assert beam is not None
                hidden = parent_states(frontier, beam.parents)
                rows = [tail.beam_rows(layer) for tail in tails]
            states = self._compute(rows, hidden, layer)
            if beam is not None:
                frontier = self._add_level(growth, scores, tails, rows, states, shape)
        for sequence, count in counts:
            self._settle(sequence, count - (self._num_layers - 1))
        grown = zip(sequences, growth.finish(), strict=True)
        return [Proposal(sequence, result.tree) for sequence, result in grown]

    def _add_level(
        self,
        growth: TreeGrowth,
        scores: DraftScores,
        tails: Sequence[LayerRows],
        rows: Sequence[SequenceRows],
        states: Tensor,
        shape: TreeShape,
    ) -> Tensor:
        """Adds the children of the last beam; returns the states `[S * K, H]` of its rows."""
        index, end = list[int](), 0
        for tail, own in zip(tails, rows, strict=True):
            end += len(own.token_ids)
            index += range(end - len(tail.paths), end)
        frontier = states.index_select(0, self._index(index))
        logits = self._runner.logits(frontier)
        growth.add(choose_children(scores(logits, [tail.paths for tail in tails]), shape.topk))
        return frontier

    def _sources(
        self, tails: Sequence[LayerRows], rows: Sequence[SequenceRows], layer: int
    ) -> Tensor:
        """Returns which of the rows of the layer before each row of `layer` reads."""
        index, start = list[int](), 0
        for tail, before in zip(tails, rows, strict=True):
            index += [start + row for row in tail.sources(layer)]
            start += len(before.token_ids)
        return self._index(index)

    def _compute(self, rows: Sequence[SequenceRows], hidden: Tensor, layer: int) -> Tensor:
        """Returns the states `[T, H]` of all rows."""
        runner = self._runner
        batch = build_batch(rows, page_size=runner.page_size, device=runner.device)
        return runner.states(batch, hidden, layer=layer)

    def _settled_rows(self, sequence: DraftSequence, count: int, *, layer: int) -> SequenceRows:
        """Lays out the next `count` rows, whose tokens every layer knows."""
        kv = self._contexts.kv_of(sequence)
        start, first_token = kv.num_computed, kv.window_start + kv.num_computed + 1 + layer
        return SequenceRows(
            token_ids=sequence.token_ids[first_token : first_token + count],
            positions=range(start, start + count),
            kv_start=start,
            pages=kv.lease.pages,
            prefix_length=start,
            tail_mask=None,
            logit_rows=(),
        )

    def _settle(self, sequence: DraftSequence, count: int) -> None:
        """Counts rows that all layers have computed for good."""
        self._contexts.kv_of(sequence).num_computed += count
        self._contexts.drop_features(sequence)

    def _index(self, rows: Sequence[int]) -> Tensor:
        return torch.tensor(rows, dtype=torch.int64, device=self._runner.device)


def _next_beam(growth: TreeGrowth, tails: Sequence[LayerRows]) -> Beam:
    """Waits for the device once a level: the host lays out the rows."""
    beam = growth.select_beam()
    columns = (each.tolist() for each in (beam.token_ids, beam.parents, beam.visible))
    for tail, *level in zip(tails, *columns, strict=True):
        tail.add_beam(*level)
    return beam
