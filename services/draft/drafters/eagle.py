"""Drafts with a one-layer head that continues the target's hidden states: EAGLE-2 and EAGLE-3.

A round costs one forward a level for all sequences together, as in `standalone`. The first takes
in the rows whose features the last verdict brought, and scores the first level; on each further
level a node reads the state its parent's row left. Sequences whose features have not arrived get
an empty tree: their target need not wait. Where the device can do without the host, it grows the
whole trees in one pass, see `head_branches`.

Drafting ahead, the states of the verified tree's nodes stand in for the features that its verdict
will bring. They are computed again from the features of each verdict, so that errors do not grow
from round to round: in passes, see `head_branches`, or by forwards of the host, see
`head_contexts`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from services.draft.draft_scores import LevelScores, level_scores
from services.draft.drafters.draft_kv import TreeTail, beam_rows, learn_levels
from services.draft.drafters.drafter import DrafterLimits, Lookahead, Proposal, SharedHead
from services.draft.drafters.head_branches import HeadBranches, HeadTrees
from services.draft.drafters.head_contexts import HeadContexts, HeadTails, LayerRows, reroot
from services.draft.drafters.outcome_drafter import JointLookahead, OutcomeDrafter
from services.draft.drafters.whole_trees import PassGraphs, grown_shape, grows_whole, split
from services.draft.events import FeatureRows
from services.draft.sequence import DraftSequence
from services.draft.worker import MappedHeadLimits
from shared.kv.leases import KvLeases
from shared.models.heads.head import DraftHead
from shared.runtime.runner import HeadRunner
from shared.runtime.tree_grower import TreeGrower
from shared.runtime.tree_model import HeadModel
from shared.speculation.noise import fresh_generator
from shared.speculation.tree import Children, TreeGrowth, choose_children, parent_states
from shared.tokens import EMPTY_TREE, TreeShape, Verdict

CONTEXT_MARGIN = 33
"""Rows of the context kept for the deepest tree and the row it hangs off."""


class EagleDrafter:
    """See `Drafter`. Whatever sets the heads apart is in `DraftHead`."""

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
        generator: see `StandaloneDrafter`.
        """
        self._runner = runner
        self._generator = generator or fresh_generator()
        self._max_context_tokens = max_context_tokens
        self._contexts = HeadContexts(
            runner,
            leases,
            max_context_tokens=max_context_tokens,
            margin_tokens=CONTEXT_MARGIN,
            keeps_features=keeps_features,
            min_rows=self._num_open_rows,
        )
        self._tails = self._new_tails()
        self._outcomes = OutcomeDrafter(
            self._tails.tail_of,
            self._tails.compute,
            max_depth=CONTEXT_MARGIN - 1,
            keeps_rows=False,
        )
        self._lookahead: Lookahead = self._outcomes
        self._branches: HeadBranches | None = None
        if grower is not None:
            trees, vocab_size = HeadTrees(grower, self._contexts), runner.head.vocabulary.size
            self._branches = HeadBranches(trees, self._contexts, vocab_size=vocab_size)
            self._lookahead = JointLookahead(self._branches, self._outcomes)

    @property
    def _graphs(self) -> PassGraphs | None:
        return None if self._branches is None else self._branches.graphs

    @property
    def lookahead(self) -> Lookahead:
        return self._lookahead

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
        """Sizes of the head in rounds of a target; None where another class adds to it."""
        if type(self) is not EagleDrafter:
            return None
        size = self._runner.head.vocabulary.size
        return MappedHeadLimits(self._runner.pool.page_size, size, self._longest)

    @property
    def _longest(self) -> int:
        """Longest sequence that needs no window."""
        return self._max_context_tokens - CONTEXT_MARGIN

    @property
    def head(self) -> DraftHead:
        """The weights, which others may copy into between two forwards."""
        return self._runner.head

    def share_head(self) -> SharedHead:
        """Lends the head and most of the free pages, for good."""
        model = HeadModel(self._runner.head, self._runner.pool)
        return SharedHead.of_most(model, self._contexts.leases, max_context_tokens=self._longest)

    def open(self, sequence: DraftSequence) -> None:
        self._contexts.open(sequence)

    def commit(
        self, sequence: DraftSequence, verdict: Verdict, features: FeatureRows | None
    ) -> None:
        token_ids = verdict.committed_token_ids
        if features is not None:
            self.add_features(sequence, features)
        if self._branches is not None and grows_whole(sequence):
            self._branches.commit(sequence, token_ids)
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

    def backlog(self, sequence: DraftSequence) -> int:
        return self._contexts.backlog(sequence)

    def reserve(self, sequence: DraftSequence, shape: TreeShape) -> bool:
        shape = self._grown_shape(shape)
        # Where verdicts are prepared for, passes compute the leaves of trees, too.
        num_levels = shape.num_steps if self._outcomes.budget else shape.num_steps - 1
        num_rows = num_levels * shape.topk
        has_room = self._contexts.reserve(sequence, num_rows)
        if not has_room and self._branches is not None and self._branches.make_room():
            has_room = self._contexts.reserve(sequence, num_rows)
        return has_room

    def catch_up(self, sequences: Sequence[DraftSequence], max_tokens: int) -> int:
        """Leaves the open rows of each: the last one's state and logits start a tree."""
        chunk: list[tuple[DraftSequence, int]] = []
        num_taken = 0
        for sequence in sequences:
            count = min(self.backlog(sequence) - self._num_open_rows, max_tokens - num_taken)
            if count > 0:
                chunk.append((sequence, count))
                num_taken += count
        if chunk:
            self._take_in(chunk)
        return num_taken

    def propose(self, sequences: Sequence[DraftSequence], shape: TreeShape) -> list[Proposal]:
        complete: list[DraftSequence] = []
        waiting: list[DraftSequence] = []
        for sequence in sequences:
            (complete if self._contexts.is_complete(sequence) else waiting).append(sequence)
        shape, branches = self._grown_shape(shape), self._branches
        whole, rest = ([], complete) if branches is None else split(complete)
        return [
            *(branches.propose(whole, shape) if branches is not None and whole else ()),
            *(self._grow(rest, shape) if rest else ()),
            *(Proposal(sequence, EMPTY_TREE) for sequence in waiting),
        ]

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

    def flush_prefix_cache(self) -> int:
        return self._contexts.leases.flush()

    def retire_prefix_cache(self) -> None:
        self._contexts.leases.retire()

    def gauges(self) -> Mapping[str, float]:
        return self._contexts.gauges()

    def check(self) -> None:
        self._contexts.leases.check()

    @property
    def _num_open_rows(self) -> int:
        """Committed rows that only a proposal computes."""
        return 1

    def _drop_ahead(self, sequence: DraftSequence) -> None:
        self._outcomes.drop(sequence)
        if self._branches is not None:
            self._branches.drop(sequence)

    def _new_tails(self) -> HeadTails:
        """Returns what computes behind committed tokens, ahead of verdicts."""
        return HeadTails(self._contexts, self._runner.device)

    def _take_in(self, counts: Sequence[tuple[DraftSequence, int]]) -> None:
        """Computes the next committed rows of each sequence."""
        self._contexts.compute(counts, with_logits=False)

    def _grow(self, sequences: Sequence[DraftSequence], shape: TreeShape) -> list[Proposal]:
        contexts = self._contexts
        growth = TreeGrowth(shape)
        scores = level_scores(sequences, shape, self._runner.device, self._generator)
        output = contexts.compute(
            [(sequence, self.backlog(sequence)) for sequence in sequences], with_logits=True
        )
        for sequence in sequences:
            contexts.publish(sequence)
        tails = [TreeTail(contexts.kv_of(s), s.token_ids[-1]) for s in sequences]
        outputs = [output]
        levels = [self._children(scores, output.logits, tails, shape)]
        growth.add(levels[0].best(shape.topk))
        while not growth.is_complete:
            beam = growth.select_beam()
            hidden = parent_states(output.states, beam.parents)
            output = contexts.run(beam_rows(beam, tails), hidden)
            outputs.append(output)
            levels.append(self._children(scores, output.logits, tails, shape))
            growth.add(levels[-1].best(shape.topk))
        if self._outcomes.budget:
            learn_levels(tails, levels)
            self._tails.keep(sequences, tails, outputs)
        trees = scores.finished([result.tree for result in growth.finish()])
        return list(map(Proposal, sequences, trees))

    def _children(
        self,
        scores: LevelScores,
        logits: Tensor,
        tails: Sequence[TreeTail | LayerRows],
        shape: TreeShape,
    ) -> Children:
        """As many as the tree needs, and those that verdicts may end in beside them."""
        width = min(shape.topk + self._outcomes.budget, self._runner.head.vocabulary.size)
        return choose_children(scores(logits, [tail.paths for tail in tails]), width)

    def _grown_shape(self, shape: TreeShape) -> TreeShape:
        return grown_shape(shape, self._runner.head.vocabulary.size)
