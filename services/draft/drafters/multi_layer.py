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

from services.draft.draft_scores import DraftScores
from services.draft.drafters.drafter import Proposal
from services.draft.drafters.eagle import EagleDrafter
from services.draft.drafters.layer_forwards import LayerForwards
from services.draft.drafters.layer_rows import LayerRows
from services.draft.drafters.layer_tails import LayerTails
from services.draft.sequence import DraftSequence
from shared.kv.batch import SequenceRows
from shared.speculation.growth import Beam, TreeGrowth, parent_states
from shared.tokens import TreeShape


class MultiLayerDrafter(EagleDrafter):
    """See `Drafter`. Its leases must not cache prefixes: a row's key there is too short for what
    the deeper layers read."""

    _tails: LayerTails

    def _new_tails(self) -> LayerTails:
        forwards = LayerForwards(self._runner, self._contexts)
        return LayerTails(self._contexts, forwards, self._runner.device)

    @property
    def _forwards(self) -> LayerForwards:
        return self._tails.forwards

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
            states = self._forwards.run(rows, states, layer)
        for sequence, count in counts:
            self._forwards.settle(sequence, count)

    def _grow(self, sequences: Sequence[DraftSequence], shape: TreeShape) -> list[Proposal]:
        forwards = self._forwards
        growth, scores = TreeGrowth(shape), DraftScores(sequences, self._runner.device)
        own = [LayerRows(self._contexts.kv_of(s), s.token_ids) for s in sequences]
        counts = [(sequence, self.backlog(sequence)) for sequence in sequences]
        rows, hidden = [each.all_rows(0) for each in own], self._contexts.hidden(counts)
        states = forwards.run(rows, hidden, 0)
        roots = [forwards.root_states(own, states, rows, 0)]
        first = self._children(scores, forwards.logits(roots[0]), own, shape)
        growth.add(first.best(shape.topk))
        frontier = roots[0]
        # A layer without a level to score still has committed rows to settle.
        for level in range(1, max(shape.num_steps, self._num_layers)):
            layer = min(level, self._num_layers - 1)
            beam = None if growth.is_complete else _next_beam(growth, own)
            if level == layer:
                hidden = forwards.take_over(own, states, rows, layer)
                rows = [each.all_rows(layer) for each in own]
            else:
                assert beam is not None
                hidden = parent_states(frontier, beam.parents)
                rows = [each.beam_rows(layer) for each in own]
            states = forwards.run(rows, hidden, layer)
            if level == layer:
                roots.append(forwards.root_states(own, states, rows, layer))
            if beam is not None:
                frontier = forwards.beam_states(own, states, rows)
                children = self._children(scores, forwards.logits(frontier), own, shape)
                growth.add(children.best(shape.topk))
        for sequence, count in counts:
            forwards.settle(sequence, count - (self._num_layers - 1))
        if self._outcomes.budget:
            self._tails.plant(sequences, torch.stack(roots, dim=1), first)
        grown = zip(sequences, growth.finish(), strict=True)
        return [Proposal(sequence, result.tree) for sequence, result in grown]

    def _settled_rows(self, sequence: DraftSequence, count: int, *, layer: int) -> SequenceRows:
        """Lays out the next `count` rows, whose tokens every layer knows."""
        kv = self._contexts.kv_of(sequence)
        start, first_token = kv.num_computed, kv.window_start + kv.num_computed + 1 + layer
        return SequenceRows.causal(
            sequence.token_ids[first_token : first_token + count], start, kv.lease.pages
        )


def _next_beam(growth: TreeGrowth, tails: Sequence[LayerRows]) -> Beam:
    """Waits for the device once a level: the host lays out the rows."""
    beam = growth.select_beam()
    for tail, own in zip(tails, beam.on_host(), strict=True):
        tail.add_beam(own)
    return beam
