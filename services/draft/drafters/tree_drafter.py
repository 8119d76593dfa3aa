"""Drafts trees with a model in passes of the device, see `pass_trees`."""

from __future__ import annotations

from collections.abc import Sequence

from services.draft.drafters.branch_drafter import BranchLookahead
from services.draft.drafters.contexts import ContextDrafter, Contexts
from services.draft.drafters.drafter import DrafterLimits, Proposal
from services.draft.drafters.pass_trees import grown_shape
from services.draft.sequence import DraftSequence
from services.draft.worker import MappedHeadLimits
from shared.runtime.outcome_chains import MAX_OUTCOMES
from shared.runtime.tree_model import RoundModel, TreeModel
from shared.tokens import TreeShape


class TreeDrafter(ContextDrafter):
    """See `Drafter`.

    Args:
        branches: grows trees, and drafts ahead; None where the drafter has a way of its own.
    """

    _branches: BranchLookahead | None

    def __init__(
        self,
        model: TreeModel,
        contexts: Contexts,
        branches: BranchLookahead | None,
        *,
        max_context_tokens: int,
    ) -> None:
        self._model, self._contexts, self._branches = model, contexts, branches
        self._max_context_tokens = max_context_tokens

    @property
    def limits(self) -> DrafterLimits:
        return DrafterLimits(
            vocab_size=self._model.id_limit,
            max_context_tokens=self._max_context_tokens,
            feature_spec=self._model.feature_spec,
            mapped_head=self._mapped_head,
        )

    @property
    def lookahead(self) -> BranchLookahead | None:
        return self._branches

    @property
    def _mapped_head(self) -> MappedHeadLimits | None:
        """Sizes of the model in rounds of a target; None where it takes part in none."""
        model = self._round_model
        if model is None:
            return None
        outcomes = MAX_OUTCOMES if model.feature_spec is None else 0
        longest = self._contexts.longest
        return MappedHeadLimits(model.pool.page_size, model.vocab_size, longest, outcomes)

    @property
    def _round_model(self) -> RoundModel | None:
        # One that several processes hold takes part in none.
        return None if self._model.group is not None else self._model

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
        return self._branches is None or self._branches.is_prepared(shape, num_sequences)

    def prepare(self, shape: TreeShape, num_sequences: int | None) -> bool:
        """Captures a graph."""
        return self._branches is not None and self._branches.prepare(shape, num_sequences)

    def _drop_ahead(self, sequence: DraftSequence) -> None:
        if self._branches is not None:
            self._branches.drop(sequence)

    def _propose(self, sequences: Sequence[DraftSequence], shape: TreeShape) -> list[Proposal]:
        assert self._branches is not None
        return self._branches.propose(sequences, shape)

    def _grown_shape(self, shape: TreeShape) -> TreeShape:
        return grown_shape(shape, self._model.vocab_size)
