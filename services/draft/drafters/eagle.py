"""Drafts with a one-layer head that continues the target's hidden states: EAGLE-2 and EAGLE-3.

The first level takes in the rows whose features the last verdict brought; on each further level a
node reads the state its parent's row left. Sequences whose features have not arrived get an empty
tree: their target need not wait.

Drafting ahead, the states of the verified tree's nodes stand in for the features that its verdict
will bring. They are computed again from the features of each verdict, so that errors do not grow
from round to round: in passes, see `head_branches`, or by forwards of the host, see
`head_contexts`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from services.draft.drafters.contexts import CONTEXT_MARGIN
from services.draft.drafters.drafter import DrafterLimits
from services.draft.drafters.head_branches import HeadBranches
from services.draft.drafters.head_contexts import HeadContexts, HeadTails, reroot
from services.draft.drafters.outcome_drafter import OutcomeDrafter
from services.draft.drafters.pass_trees import PassTrees
from services.draft.drafters.tails import TreeTail
from services.draft.drafters.tree_drafter import TreeDrafter
from services.draft.events import FeatureRows
from services.draft.sequence import DraftSequence
from services.draft.worker import MappedHeadLimits
from shared.kv.batch import SequenceRows
from shared.kv.leases import KvLeases
from shared.models.heads.head import DraftHead
from shared.runtime.runner import HeadRunner
from shared.runtime.tree_grower import TreeGrower
from shared.runtime.tree_model import HeadModel
from shared.speculation.tree import parent_states
from shared.tokens import Verdict


class _Levels:
    """See `Levels`."""

    def __init__(
        self, contexts: HeadContexts, tails: HeadTails, sequences: Sequence[DraftSequence]
    ) -> None:
        self._contexts, self._tails, self._sequences = contexts, tails, sequences
        counts = [(sequence, contexts.backlog(sequence)) for sequence in sequences]
        self._outputs = [contexts.compute(counts, with_logits=True)]
        self.logits = self._outputs[0].logits

    def advance(self, rows: Sequence[SequenceRows], parents: Tensor) -> Tensor:
        hidden = parent_states(self._outputs[-1].states, parents)
        self._outputs.append(self._contexts.run(rows, hidden))
        return self._outputs[-1].logits

    def keep(self, tails: Sequence[TreeTail], *, is_ahead: bool) -> None:
        if is_ahead:
            self._tails.keep(self._sequences, tails, self._outputs)


class EagleDrafter(TreeDrafter):
    """See `TreeDrafter`. Whatever sets the heads apart is in `DraftHead`."""

    _contexts: HeadContexts

    def __init__(
        self,
        runner: HeadRunner,
        leases: KvLeases,
        *,
        max_context_tokens: int,
        keeps_features: bool,
        grower: TreeGrower | None = None,
        generator: torch.Generator | None = None,
    ) -> None:
        """Args:
        keeps_features: see `HeadContexts`.
        grower: of the runner's head and pool; None grows all trees level by level.
        """
        self._runner = runner
        contexts = HeadContexts(
            runner,
            leases,
            max_context_tokens=max_context_tokens,
            keeps_features=keeps_features,
            min_rows=self._num_open_rows,
        )
        branches, vocab_size = None, runner.head.vocabulary.size
        if grower is not None:
            trees = PassTrees(grower, contexts)
            branches = HeadBranches(trees, contexts, vocab_size=vocab_size)
        self._tails = self._new_tails(contexts)
        super().__init__(
            contexts,
            OutcomeDrafter(
                self._tails.tail_of,
                self._tails.compute,
                max_depth=CONTEXT_MARGIN - 1,
                keeps_rows=False,
            ),
            branches,
            device=runner.device,
            vocab_size=vocab_size,
            max_context_tokens=max_context_tokens,
            generator=generator,
        )

    @property
    def limits(self) -> DrafterLimits:
        head = self._runner.head
        return DrafterLimits(
            vocab_size=head.config.vocab_size,
            max_context_tokens=self._max_context_tokens,
            feature_spec=head.feature_spec,
            mapped_head=self._mapped_head,
        )

    @property
    def _mapped_head(self) -> MappedHeadLimits | None:
        page_size = self._runner.pool.page_size
        return MappedHeadLimits(page_size, self._vocab_size, self._contexts.longest)

    @property
    def head(self) -> DraftHead:
        """The weights, which others may copy into between two forwards."""
        return self._runner.head

    def commit(
        self, sequence: DraftSequence, verdict: Verdict, features: FeatureRows | None
    ) -> None:
        token_ids, branches = verdict.committed_token_ids, self._grows_whole(sequence)
        if features is not None:
            self.add_features(sequence, features)
        if branches is not None:
            branches.commit(sequence, token_ids)
        else:
            self._outcomes.observe(sequence, token_ids)
            self._outcomes.drop(sequence)
            reroot(self._contexts.kv_of(sequence), token_ids)
        if self._contexts.slide(sequence):
            # A pass under way reads pages of the old window, which others may have from now on.
            self._drop_ahead(sequence)

    def add_features(self, sequence: DraftSequence, rows: FeatureRows) -> None:
        has_started_over = self._contexts.add_features(sequence, rows)
        if has_started_over:
            self._drop_ahead(sequence)

    def _tree_model(self) -> HeadModel:
        return HeadModel(self._runner.head, self._runner.pool)

    def _begin_levels(self, sequences: Sequence[DraftSequence]) -> _Levels:
        return _Levels(self._contexts, self._tails, sequences)

    def _new_tails(self, contexts: HeadContexts) -> HeadTails:
        """Returns what computes behind committed tokens, ahead of verdicts."""
        return HeadTails(contexts, self._runner.device)
