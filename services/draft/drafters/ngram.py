"""Drafts by looking up what followed the same words before: no model, no torch.

One index holds the n-grams of every sequence this worker has seen, prompts, outputs and an
optional corpus, so a text that was written once drafts itself the next time. What it proposes
depends on what other sequences wrote; what is generated never does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from services.draft.drafters.drafter import DrafterLimits, Proposal
from services.draft.drafters.ngram_lookahead import NgramLookahead
from services.draft.events import FeatureRows
from services.draft.sequence import DraftSequence, SequenceKey
from shared.ngram.index import Cursor, NgramIndex, NgramOptions
from shared.tokens import TokenTree, TreeShape, Verdict


class NgramDrafter:
    """See `Drafter`; state per sequence is a cursor into the shared index."""

    def __init__(self, options: NgramOptions) -> None:
        self._index = NgramIndex(options)
        self._cursors: dict[SequenceKey, Cursor] = {}
        self._lookahead = NgramLookahead(self._index, self._current)

    @property
    def lookahead(self) -> NgramLookahead:
        return self._lookahead

    @property
    def limits(self) -> DrafterLimits:
        return DrafterLimits()

    def learn(self, token_ids: Sequence[int]) -> None:
        """Takes a text of the corpus in."""
        self._index.learn(token_ids)

    def open(self, sequence: DraftSequence) -> None:
        self._cursors[sequence.key] = self._index.cursor(sequence.cache_salt)

    def commit(
        self, sequence: DraftSequence, verdict: Verdict, features: FeatureRows | None
    ) -> None:
        """Committed tokens are taken in with the next proposal."""
        self._lookahead.drop(sequence)
        num_committed = len(verdict.committed_token_ids)
        if self._lookahead.budget and self.backlog(sequence) == num_committed:
            self._lookahead.observe(self._cursors[sequence.key], verdict.committed_token_ids)

    def add_features(self, sequence: DraftSequence, rows: FeatureRows) -> None:
        """Nothing to do: n-grams read tokens only."""

    def backlog(self, sequence: DraftSequence) -> int:
        return sequence.num_tokens - self._cursors[sequence.key].num_seen

    def reserve(self, sequence: DraftSequence, shape: TreeShape) -> bool:
        return True

    def catch_up(self, sequences: Sequence[DraftSequence], max_tokens: int) -> int:
        num_taken = 0
        for sequence in sequences:
            limit = min(self.backlog(sequence), max_tokens - num_taken)
            self._index.take_in(self._cursors[sequence.key], sequence.token_ids, limit)
            num_taken += limit
        return num_taken

    def propose(self, sequences: Sequence[DraftSequence], shape: TreeShape) -> list[Proposal]:
        return [Proposal(sequence, self._propose_one(sequence, shape)) for sequence in sequences]

    def close(self, sequence: DraftSequence) -> None:
        self._lookahead.drop(sequence)
        del self._cursors[sequence.key]

    def is_prepared(self, shape: TreeShape, num_sequences: int) -> bool:
        """There are no graphs."""
        return True

    def prepare_for(self, shape: TreeShape, num_sequences: int) -> bool:
        return False

    def prepare_next(self, shape: TreeShape) -> bool:
        """Nothing to do: there are no graphs."""
        return False

    def flush_prefix_cache(self) -> int:
        """Nothing to free: the trie forgets by age, not by page."""
        return 0

    def retire_prefix_cache(self) -> None:
        """Nothing to do: what was said stays said."""

    def gauges(self) -> Mapping[str, float]:
        return {
            "trie_node_count": float(len(self._index)),
            "trie_eviction_count": float(self._index.num_evictions),
        }

    def check(self) -> None:
        self._index.check()

    def _propose_one(self, sequence: DraftSequence, shape: TreeShape) -> TokenTree:
        return self._index.grow(self._current(sequence), sequence.token_ids, shape)

    def _current(self, sequence: DraftSequence) -> Cursor:
        """Returns the sequence's cursor with every committed token taken in."""
        cursor = self._cursors[sequence.key]
        self._index.take_in(cursor, sequence.token_ids, self.backlog(sequence))
        return cursor
