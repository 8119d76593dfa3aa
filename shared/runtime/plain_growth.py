"""The growth of trees in plain torch: `TreeGrowth` on the slots of a state."""

from __future__ import annotations

import torch
from torch import Tensor

from shared.kv.batch import ForwardBatch
from shared.runtime.round_batches import RoundBatches, RoundTree
from shared.runtime.round_sampling import RoundSampling
from shared.runtime.round_state import RoundState
from shared.runtime.tree_draft import ScoredRows
from shared.speculation.growth import Beam, Children, TreeGrowth, choose_children
from shared.speculation.tree import tree_rows


class PlainScores:
    """See `Scores`.

    Args:
        width: tokens to find after each row.
    """

    def __init__(self, state: RoundState, sampling: RoundSampling, width: int) -> None:
        self._state, self._sampling, self._width = state, sampling, width
        self._levels: list[Children] = []

    def best(self, logits: Tensor) -> Children:
        """Returns the best tokens after each row of the next level."""
        scores = self._sampling.confidence(logits, self._state, len(self._levels))
        rows = scores.view(self._state.num_slots, -1, logits.shape[1])
        self._levels.append(choose_children(rows, self._width))
        return self._levels[-1]

    def look(self, logits: Tensor) -> None:
        """See `Scores.look`."""
        self.best(logits)

    def choices(self) -> Children:
        """See `Scores.choices`."""
        return Children(
            torch.cat([each.token_ids for each in self._levels], dim=1),
            torch.cat([each.log_probs for each in self._levels], dim=1),
        )


class PlainGrowth:
    """See `Growth`."""

    def __init__(self, state: RoundState, batches: RoundBatches, scores: PlainScores) -> None:
        self._state, self._batches, self.scores = state, batches, scores
        self._growth, self._beams = TreeGrowth(batches.shape.tree), list[Beam]()

    def add(self, logits: Tensor) -> None:
        """See `Growth.add`."""
        self._growth.add(self.scores.best(logits).best(self._batches.shape.tree.topk))

    def beam(self) -> tuple[ForwardBatch, Tensor]:
        """See `Growth.beam`."""
        beam, level = self._growth.select_beam(), len(self._beams)
        self._beams.append(beam)
        num_before = self._batches.shape.tree.topk if level else 1
        first_rows = torch.arange(self._state.num_slots, device=beam.parents.device) * num_before
        parents = first_rows.unsqueeze(1) + beam.parents
        return self._batches.of_beam(self._state, beam, level), parents.flatten()

    def scored(self) -> ScoredRows:
        """See `Growth.scored`."""
        tree, roots = self._batches.shape.tree, self._state.roots
        nodes = self._growth.select()
        # A tree may have no level that is computed.
        none = roots.new_empty((2, self._state.num_slots, 0, tree.topk))
        levels = [torch.stack((each.token_ids, each.parents)).unsqueeze(2) for each in self._beams]
        return ScoredRows(
            tree_rows(nodes, roots, tree.num_steps),
            torch.cat((torch.zeros_like(nodes.path[:, :1]), nodes.path), dim=1),
            torch.cat((none, *levels), dim=2),
        )

    def finish(self) -> RoundTree:
        """See `Growth.finish`."""
        return self._batches.of_trees(self._state, self.scored().rows)


def plain_scores(
    state: RoundState, batches: RoundBatches, sampling: RoundSampling, num_choices: int
) -> PlainScores:
    """Returns what finds the children that trees need, or as many tokens as are asked for."""
    return PlainScores(state, sampling, num_choices or batches.shape.tree.topk)
