"""Drafts trees with a model: in passes of the device, or level by level.

Level by level a round costs one forward a level for all sequences together. The first takes in the
rows that the last verdict left, and scores the first level; each further level computes the K
frontier nodes of the tree. Where the device can do without the host, it grows the whole trees in
one pass, see `pass_trees`.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from services.draft.draft_scores import LevelScores, level_scores
from services.draft.drafters.branch_drafter import BranchLookahead
from services.draft.drafters.contexts import ContextDrafter, Contexts
from services.draft.drafters.drafter import Proposal, SharedHead
from services.draft.drafters.tails import beam_rows
from services.draft.drafters.whole_trees import PassGraphs, grown_shape, grows_whole, split
from services.draft.sequence import DraftSequence
from services.draft.worker import MappedHeadLimits
from shared.kv.batch import SequenceRows
from shared.runtime.tree_model import TreeModel
from shared.speculation.noise import fresh_generator
from shared.speculation.tree import Children, TreeGrowth, choose_children
from shared.tokens import TreeShape

NextLevel = Callable[[Sequence[SequenceRows], Tensor], Tensor]
"""From the rows of a level and their parents `[S, K]`, see `Beam`, to logits `[S * K, V]`."""


class TreeDrafter(ContextDrafter):
    """See `Drafter`.

    Args:
        vocab_size: tokens that the model can propose.
        branches: grows trees in passes, and drafts ahead; None grows all of them level by level.
        generator: of the host; the source of what is drawn for targets that verify by the draft's
            distributions. Seeded by the system when left out.
    """

    _branches: BranchLookahead | None

    def __init__(
        self,
        contexts: Contexts,
        branches: BranchLookahead | None,
        *,
        device: torch.device,
        vocab_size: int,
        max_context_tokens: int,
        generator: torch.Generator | None,
    ) -> None:
        self._contexts, self._branches = contexts, branches
        self._device, self._vocab_size = device, vocab_size
        self._max_context_tokens = max_context_tokens
        self._generator = generator or fresh_generator()

    @property
    def lookahead(self) -> BranchLookahead | None:
        return self._branches

    @property
    @abstractmethod
    def _mapped_head(self) -> MappedHeadLimits | None:
        """Sizes of the model in rounds of a target; None where it takes part in none."""

    @abstractmethod
    def _tree_model(self) -> TreeModel:
        """Returns the model as rounds use it."""

    def share_head(self) -> SharedHead | None:
        """Lends the model and most of the free pages, for good; None where no round takes it."""
        contexts = self._contexts
        if self._mapped_head is None:
            return None
        return SharedHead.of_most(
            self._tree_model(), contexts.leases, max_context_tokens=contexts.longest
        )

    def reserve(self, sequence: DraftSequence, shape: TreeShape) -> bool:
        shape = self._grown_shape(shape)
        # Where verdicts are prepared for, the leaves of trees are computed, too.
        is_ahead = self._branches is not None and self._branches.budget > 0
        num_levels = shape.num_steps if is_ahead else shape.num_steps - 1
        num_rows = num_levels * shape.topk
        has_room = self._contexts.reserve(sequence, num_rows)
        if not has_room and self._branches is not None and self._branches.make_room():
            has_room = self._contexts.reserve(sequence, num_rows)
        return has_room

    def close(self, sequence: DraftSequence) -> None:
        self._drop_ahead(sequence)
        self._contexts.close(sequence)

    def is_prepared(self, shape: TreeShape, num_sequences: int) -> bool:
        return self._graphs is None or self._graphs.is_prepared(shape, num_sequences)

    def prepare_for(self, shape: TreeShape, num_sequences: int) -> bool:
        """Captures a graph of trees that are grown in one pass."""
        return self._graphs is not None and self._graphs.prepare_for(shape, num_sequences)

    def prepare_next(self, shape: TreeShape) -> bool:
        """Captures a graph of trees that are grown in one pass."""
        return self._graphs is not None and self._graphs.prepare_next(shape)

    @property
    def _graphs(self) -> PassGraphs | None:
        return None if self._branches is None else self._branches.graphs

    def _grows_whole(self, sequence: DraftSequence) -> BranchLookahead | None:
        """Returns what grows the trees of a sequence; None where they grow level by level."""
        return self._branches if grows_whole(sequence) else None

    def _drop_ahead(self, sequence: DraftSequence) -> None:
        if self._branches is not None:
            self._branches.drop(sequence)

    def _propose(self, sequences: Sequence[DraftSequence], shape: TreeShape) -> list[Proposal]:
        shape, branches = self._grown_shape(shape), self._branches
        whole, rest = ([], sequences) if branches is None else split(sequences)
        return [
            *(branches.propose(whole, shape) if branches is not None and whole else ()),
            *(self._grow(rest, shape) if rest else ()),
        ]

    def _grow(self, sequences: Sequence[DraftSequence], shape: TreeShape) -> list[Proposal]:
        """Grows trees level by level."""
        contexts, growth = self._contexts, TreeGrowth(shape)
        scores = level_scores(sequences, shape, self._device, self._generator)
        logits, next_level = self._begin_levels(sequences)
        for sequence in sequences:
            contexts.publish(sequence)
        tails = [contexts.tree_tail(sequence) for sequence in sequences]
        growth.add(self._children(scores, logits, [tail.paths for tail in tails], shape))
        while not growth.is_complete:
            beam = growth.select_beam()
            logits = next_level(beam_rows(beam, tails), beam.parents)
            growth.add(self._children(scores, logits, [tail.paths for tail in tails], shape))
        for sequence, tail in zip(sequences, tails, strict=True):
            contexts.plant(sequence, tail)
        return list(map(Proposal, sequences, scores.finished(growth.finish())))

    @abstractmethod
    def _begin_levels(self, sequences: Sequence[DraftSequence]) -> tuple[Tensor, NextLevel]:
        """Computes the committed rows that are left; returns logits `[S, V]` of the last ones, and
        what computes the levels of trees behind them."""

    def _children(
        self,
        scores: LevelScores,
        logits: Tensor,
        paths: Sequence[Sequence[tuple[int, ...]]],
        shape: TreeShape,
    ) -> Children:
        """Returns as many as the tree needs."""
        return choose_children(scores(logits, paths), min(shape.topk, self._vocab_size))

    def _grown_shape(self, shape: TreeShape) -> TreeShape:
        return grown_shape(shape, self._vocab_size)
