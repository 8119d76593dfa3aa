"""Drafts by looking up what followed the same words before: no model, no torch.

One trie holds the n-grams of every sequence this worker has seen, prompts, outputs and an
optional corpus, so a text that was written once drafts itself the next time. What it proposes
depends on what other sequences wrote; what is generated never does.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from services.draft.drafters.drafter import DrafterLimits, Proposal
from services.draft.drafters.ngram_tree import grow_by_frequency, grow_by_recency
from services.draft.drafters.ngram_trie import ROOT, NgramTrie
from services.draft.events import FeatureRows
from services.draft.sequence import DraftSequence, SequenceKey
from shared.tokens import EMPTY_TREE, TokenTree, TreeShape, Verdict


class MatchType(enum.Enum):
    """How a tree is grown from the trie."""

    BFS = "BFS"
    PROB = "PROB"


@dataclass(frozen=True, slots=True)
class NgramOptions:
    """What the trie holds and how it is read.

    Attributes:
        max_trie_depth: longest n-gram, context and continuation together.
        capacity: most trie nodes.
        min_breadth: fewest children of a node in BFS trees, at the longest context; the most are
            the tree shape's `topk`.
    """

    match_type: MatchType = MatchType.BFS
    max_trie_depth: int = 18
    capacity: int = 10_000_000
    min_breadth: int = 1


@dataclass(slots=True)
class _Cursor:
    """Where a text ends in the trie.

    Attributes:
        nodes: element i is the node of the last i + 1 tokens taken in, None if it was evicted.
        num_seen: tokens taken in.
        num_evictions: the trie's count when `nodes` was valid.
    """

    nodes: list[int | None] = field(default_factory=list)
    num_seen: int = 0
    num_evictions: int = 0


class NgramDrafter:
    """See `Drafter`; state per sequence is a cursor into the shared trie."""

    def __init__(self, options: NgramOptions) -> None:
        self._options = options
        self._trie = NgramTrie(max_depth=options.max_trie_depth, capacity=options.capacity)
        self._cursors: dict[SequenceKey, _Cursor] = {}

    @property
    def limits(self) -> DrafterLimits:
        return DrafterLimits()

    def learn(self, token_ids: Sequence[int]) -> None:
        """Takes a text of the corpus in."""
        self._take_in(_Cursor(), token_ids, len(token_ids))

    def open(self, sequence: DraftSequence) -> None:
        self._cursors[sequence.key] = _Cursor(num_evictions=self._trie.num_evictions)

    def commit(
        self, sequence: DraftSequence, verdict: Verdict, features: FeatureRows | None
    ) -> None:
        """Nothing to do: committed tokens are taken in with the next proposal."""

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
            self._take_in(self._cursors[sequence.key], sequence.token_ids, limit)
            num_taken += limit
        return num_taken

    def propose(self, sequences: Sequence[DraftSequence], shape: TreeShape) -> list[Proposal]:
        return [Proposal(sequence, self._propose_one(sequence, shape)) for sequence in sequences]

    def close(self, sequence: DraftSequence) -> None:
        del self._cursors[sequence.key]

    def flush_prefix_cache(self) -> int:
        """Nothing to free: the trie forgets by age, not by page."""
        return 0

    def gauges(self) -> Mapping[str, float]:
        return {
            "trie_node_count": float(len(self._trie)),
            "trie_eviction_count": float(self._trie.num_evictions),
        }

    def check(self) -> None:
        self._trie.check()

    def _propose_one(self, sequence: DraftSequence, shape: TreeShape) -> TokenTree:
        cursor = self._cursors[sequence.key]
        self._take_in(cursor, sequence.token_ids, self.backlog(sequence))
        self._refresh(cursor, sequence.token_ids)
        anchors = [(node, index + 1) for index, node in enumerate(cursor.nodes) if node is not None]
        if not anchors:
            return EMPTY_TREE
        anchors.reverse()
        if self._options.match_type is MatchType.PROB:
            return grow_by_frequency(self._trie, anchors, shape)
        return grow_by_recency(self._trie, anchors, shape, min_breadth=self._options.min_breadth)

    def _take_in(self, cursor: _Cursor, token_ids: Sequence[int], num_tokens: int) -> None:
        """Counts the n-grams that end at each of the next `num_tokens` tokens."""
        for _ in range(num_tokens):
            self._refresh(cursor, token_ids)
            self._see(cursor, token_ids[cursor.num_seen])

    def _see(self, cursor: _Cursor, token: int) -> None:
        trie = self._trie
        extended: list[int | None] = [trie.see(ROOT, token)]
        for node in cursor.nodes:
            # An eviction may have given the node to another n-gram; the next refresh repairs it.
            is_valid = node is not None and trie.num_evictions == cursor.num_evictions
            extended.append(trie.see(node, token) if node is not None and is_valid else None)
        # N-grams of the full depth have no continuation, so they are no anchors.
        cursor.nodes = extended[: trie.max_depth - 1]
        cursor.num_seen += 1

    def _refresh(self, cursor: _Cursor, token_ids: Sequence[int]) -> None:
        """Finds the cursor's nodes again after evictions."""
        if cursor.num_evictions == self._trie.num_evictions:
            return
        end = cursor.num_seen
        cursor.nodes = [
            self._trie.find(token_ids[end - length : end])
            for length in range(1, min(end, self._trie.max_depth - 1) + 1)
        ]
        cursor.num_evictions = self._trie.num_evictions
