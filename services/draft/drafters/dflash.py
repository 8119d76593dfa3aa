"""Drafts a whole block in one forward, from the target's features: DFlash.

A round costs one forward for all sequences together, whatever the length of the block. Before it
the features that the last verdict brought become keys and values of their positions. Each row of
the block scores the token at its own position; the candidates are the best of each, a chain, or a
tree over the marginals when the shape has siblings (see `block_tree`).

Source: Chen et al., DFlash, arXiv 2602.06036.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from services.draft.draft_scores import DraftScores
from services.draft.drafters.block_contexts import BlockContexts, BlockRows
from services.draft.drafters.block_lookahead import BlockLookahead, best_choices
from services.draft.drafters.drafter import DrafterLimits, Proposal
from services.draft.events import FeatureRows
from services.draft.sequence import DraftSequence
from shared.kv.batch import SequenceRows
from shared.models.heads.dflash import DflashHead
from shared.runtime.head_runner import BlockRunner
from shared.tokens import EMPTY_TREE, TreeShape, Verdict


class DflashDrafter:
    """See `Drafter`; state per sequence is the keys and values of its context."""

    def __init__(
        self, runner: BlockRunner, num_pages: int, *, block_size: int, window_tokens: int
    ) -> None:
        """Args:
        num_pages, window_tokens: see `BlockContexts`.
        block_size: rows of a block, the last committed token included; at least 2.
        """
        self._runner = runner
        self._block_size = block_size
        self._window_tokens = window_tokens
        self._contexts = BlockContexts(runner, num_pages, window_tokens=window_tokens)
        self._lookahead = BlockLookahead(runner.head, self._contexts, block_size=block_size)

    @property
    def head(self) -> DflashHead:
        """The weights."""
        return self._runner.head

    @property
    def lookahead(self) -> BlockLookahead:
        return self._lookahead

    @property
    def limits(self) -> DrafterLimits:
        head = self._runner.head
        return DrafterLimits(
            vocab_size=head.vocab_size,
            max_context_tokens=self._window_tokens + self._block_size,
            feature_spec=head.feature_spec,
        )

    def open(self, sequence: DraftSequence) -> None:
        self._contexts.open(sequence)

    def commit(
        self, sequence: DraftSequence, verdict: Verdict, features: FeatureRows | None
    ) -> None:
        if features is not None:
            self.add_features(sequence, features)
        self._lookahead.observe(sequence, verdict.committed_token_ids)
        self._contexts.slide(sequence)

    def add_features(self, sequence: DraftSequence, rows: FeatureRows) -> None:
        self._contexts.add_features(sequence, rows)

    def backlog(self, sequence: DraftSequence) -> int:
        return self._contexts.backlog(sequence)

    def reserve(self, sequence: DraftSequence, shape: TreeShape) -> bool:
        return self._contexts.reserve(sequence, self._block_size)

    def catch_up(self, sequences: Sequence[DraftSequence], max_tokens: int) -> int:
        chunk: list[tuple[DraftSequence, int]] = []
        num_taken = 0
        for sequence in sequences:
            count = min(self.backlog(sequence), max_tokens - num_taken)
            chunk.append((sequence, count))
            num_taken += count
        self._contexts.take_in(chunk)
        return num_taken

    def propose(self, sequences: Sequence[DraftSequence], shape: TreeShape) -> list[Proposal]:
        complete = [sequence for sequence in sequences if self._contexts.is_complete(sequence)]
        waiting = [sequence for sequence in sequences if not self._contexts.is_complete(sequence)]
        grown = self._draft(complete, shape) if complete else []
        return [*grown, *(Proposal(sequence, EMPTY_TREE) for sequence in waiting)]

    def close(self, sequence: DraftSequence) -> None:
        self._lookahead.drop(sequence)
        self._contexts.close(sequence)

    def is_prepared(self, shape: TreeShape, num_sequences: int) -> bool:
        """There are no graphs."""
        return True

    def prepare_for(self, shape: TreeShape, num_sequences: int) -> bool:
        return False

    def prepare_next(self, shape: TreeShape) -> bool:
        """Nothing to do: there are no graphs."""
        return False

    def flush_prefix_cache(self) -> int:
        """Nothing to free: features come for every sequence, so nothing is shared."""
        return 0

    def retire_prefix_cache(self) -> None:
        """Nothing to do: nothing is shared."""

    def gauges(self) -> Mapping[str, float]:
        return self._contexts.gauges()

    def check(self) -> None:
        self._contexts.check()

    def _draft(self, sequences: Sequence[DraftSequence], shape: TreeShape) -> list[Proposal]:
        contexts, budget = self._contexts, self._lookahead.budget
        contexts.take_in([(sequence, self.backlog(sequence)) for sequence in sequences])
        # A verdict's bonus token may lie one position behind the tree.
        depth = min(shape.num_steps, shape.max_node_count) + bool(budget)
        num_scored = min(self._block_size - 1, depth)
        logits = contexts.run([self._block_rows(sequence, num_scored) for sequence in sequences])
        scores = DraftScores(sequences, self._runner.device).of_block(logits)
        proposals = []
        for sequence, choices in zip(
            sequences, best_choices(scores, shape.topk + budget), strict=True
        ):
            proposals.append(Proposal(sequence, choices.tree(shape)))
            if budget:
                self._lookahead.keep(sequence, choices)
        return proposals

    def _block_rows(self, sequence: DraftSequence, num_scored: int) -> SequenceRows:
        rows = BlockRows(
            self._contexts.pages_of(sequence),
            block_size=self._block_size,
            mask_token_id=self._runner.head.config.mask_token_id,
        )
        rows.add_block(None, sequence.token_ids[-1], num_scored)
        return rows.lay_out()
