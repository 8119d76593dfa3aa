"""Drafts with a one-layer head that continues the target's hidden states: EAGLE-2 and EAGLE-3.

Sequences whose features have not arrived get an empty tree: their target need not wait.

Drafting ahead, the states of the verified tree's nodes stand in for the features that its verdict
will bring. They are computed again from the features of each verdict, so that errors do not grow
from round to round, see `head_branches`."""

from __future__ import annotations

import torch

from services.draft.drafters.head_branches import HeadBranches
from services.draft.drafters.head_contexts import HeadContexts
from services.draft.drafters.pass_trees import PassTrees
from services.draft.drafters.tree_drafter import TreeDrafter
from services.draft.events import FeatureRows
from services.draft.sequence import DraftSequence
from shared.kv.leases import KvLeases
from shared.models.heads.head import DraftHead
from shared.runtime.tree_grower import TreeGrower
from shared.runtime.tree_model import HeadModel
from shared.tokens import Verdict


class EagleDrafter(TreeDrafter):
    """See `TreeDrafter`. Whatever sets the heads apart is in `DraftHead`."""

    _contexts: HeadContexts
    _model: HeadModel

    def __init__(
        self,
        model: HeadModel,
        leases: KvLeases,
        *,
        max_context_tokens: int,
        keeps_features: bool,
        grower: TreeGrower | None = None,
        generator: torch.Generator | None = None,
    ) -> None:
        """Args:
        keeps_features: see `HeadContexts`.
        grower: of the model; None for heads of several layers.
        generator: see `PassTrees`.
        """
        contexts = HeadContexts(
            model,
            leases,
            max_context_tokens=max_context_tokens,
            keeps_features=keeps_features,
            min_rows=len(model.head.layers),
        )
        branches = None
        if grower is not None:
            branches = HeadBranches(PassTrees(grower, contexts, generator), contexts)
        super().__init__(model, contexts, branches, max_context_tokens=max_context_tokens)

    @property
    def head(self) -> DraftHead:
        """The weights, which others may copy into between two forwards."""
        return self._model.head

    def commit(
        self, sequence: DraftSequence, verdict: Verdict, features: FeatureRows | None
    ) -> None:
        if features is not None:
            self.add_features(sequence, features)
        if self._branches is not None:
            self._branches.commit(sequence, verdict.committed_token_ids)
        if self._contexts.slide(sequence):
            # A pass under way reads pages of the old window, which others may have from now on.
            self._drop_ahead(sequence)

    def add_features(self, sequence: DraftSequence, rows: FeatureRows) -> None:
        has_started_over = self._contexts.add_features(sequence, rows)
        if has_started_over:
            self._drop_ahead(sequence)
