"""Drafts with a one-layer head that continues the target's hidden states: EAGLE-2 and EAGLE-3.

A round costs one forward a level for all sequences together, as in `standalone`. The first takes
in the rows whose features the last verdict brought, and scores the first level; on each further
level a node reads the state its parent's row left. Sequences whose features have not arrived get
an empty tree: their target need not wait. Where the device can do without the host, it grows the
whole trees in one pass, see `head_trees`.

Drafting ahead, the states of the verified tree's nodes stand in for the features that its verdict
will bring. They are computed again from the features of each verdict, so that errors do not grow
from round to round.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from services.draft.chain_draws import LevelScores, level_scores
from services.draft.drafters.drafter import DrafterLimits, Proposal
from services.draft.drafters.head_contexts import HeadContexts
from services.draft.drafters.head_loan import HeadLoan
from services.draft.drafters.head_tails import HeadTails, reroot
from services.draft.drafters.head_trees import HeadTrees
from services.draft.drafters.layer_rows import LayerRows
from services.draft.drafters.outcome_drafter import OutcomeDrafter
from services.draft.drafters.tree_tail import TreeTail, beam_rows, learn_levels
from services.draft.drafters.whole_trees import split
from services.draft.events import FeatureRows
from services.draft.sequence import DraftSequence
from shared.kv.leases import KvLeases
from shared.runtime.head_runner import HeadRunner
from shared.runtime.tree_grower import TreeGrower
from shared.speculation.growth import Children, TreeGrowth, choose_children, parent_states
from shared.speculation.noise import fresh_generator
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
        self._trees = None if grower is None else HeadTrees(grower, self._contexts)
        self._tails = self._new_tails()
        self._outcomes = OutcomeDrafter(
            self._tails.tail_of,
            self._tails.compute,
            max_depth=CONTEXT_MARGIN - 1,
            keeps_rows=False,
        )

    @property
    def foresight(self) -> OutcomeDrafter:
        return self._outcomes

    @property
    def limits(self) -> DrafterLimits:
        head = self._runner.head
        return DrafterLimits(
            vocab_size=head.config.vocab_size,
            max_context_tokens=self._max_context_tokens,
            feature_spec=head.feature_spec,
        )

    def lend(self) -> HeadLoan:
        """Lends the head and half of the free pages; called before any sequence is opened."""
        longest = self._max_context_tokens - CONTEXT_MARGIN
        return HeadLoan.of_half(self._runner, self._contexts.leases, max_context_tokens=longest)

    def open(self, sequence: DraftSequence) -> None:
        self._contexts.open(sequence)

    def commit(
        self, sequence: DraftSequence, verdict: Verdict, features: FeatureRows | None
    ) -> None:
        if features is not None:
            self.add_features(sequence, features)
        self._outcomes.observe(sequence, verdict.committed_token_ids)
        self._outcomes.drop(sequence)
        reroot(self._contexts.kv_of(sequence), verdict.committed_token_ids)
        self._contexts.slide(sequence)

    def add_features(self, sequence: DraftSequence, rows: FeatureRows) -> None:
        has_started_over = self._contexts.add_features(sequence, rows)
        if has_started_over:
            self._outcomes.drop(sequence)

    def backlog(self, sequence: DraftSequence) -> int:
        return self._contexts.backlog(sequence)

    def reserve(self, sequence: DraftSequence, shape: TreeShape) -> bool:
        shape = self._grown_shape(shape)
        return self._contexts.reserve(sequence, (shape.num_steps - 1) * shape.topk)

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
        complete = [sequence for sequence in sequences if self._contexts.is_complete(sequence)]
        waiting = [sequence for sequence in sequences if not self._contexts.is_complete(sequence)]
        grown_shape = self._grown_shape(shape)
        # Drafting ahead goes on from the states of every level.
        trees = None if self._outcomes.budget else self._trees
        whole, rest = ([], complete) if trees is None else split(complete)
        return [
            *(trees.grow(whole, grown_shape) if trees is not None else ()),
            *(self._grow(rest, grown_shape) if rest else ()),
            *(Proposal(sequence, EMPTY_TREE) for sequence in waiting),
        ]

    def close(self, sequence: DraftSequence) -> None:
        self._outcomes.drop(sequence)
        self._contexts.close(sequence)

    def is_prepared(self, shape: TreeShape, num_sequences: int) -> bool:
        # Drafting ahead goes level by level.
        if self._trees is None or self._outcomes.budget:
            return True
        return self._trees.is_ready(self._grown_shape(shape), num_sequences)

    def prepare_for(self, shape: TreeShape, num_sequences: int) -> bool:
        """Captures a graph of trees that are grown in one pass."""
        grown = self._grown_shape(shape)
        return self._trees is not None and self._trees.capture_for(grown, num_sequences)

    def prepare_next(self, shape: TreeShape) -> bool:
        """Captures a graph of trees that are grown in one pass."""
        grown_shape = self._grown_shape(shape)
        return self._trees is not None and self._trees.capture_next(grown_shape)

    def flush_prefix_cache(self) -> int:
        return self._contexts.leases.flush()

    def gauges(self) -> Mapping[str, float]:
        return self._contexts.gauges()

    def check(self) -> None:
        self._contexts.leases.check()

    @property
    def _num_open_rows(self) -> int:
        """Committed rows that only a proposal computes."""
        return 1

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
        """Levels beyond the last kept node of a chain, and children beyond the vocabulary, would be
        grown in vain."""
        return replace(
            shape,
            num_steps=min(shape.num_steps, shape.max_node_count),
            topk=min(shape.topk, self._runner.head.vocabulary.size),
        )
