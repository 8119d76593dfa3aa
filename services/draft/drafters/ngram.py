"""Drafts by looking up what followed the same words before: no model, no torch.

One index holds the n-grams of every sequence this worker has seen, prompts, outputs and an
optional corpus, so a text that was written once drafts itself the next time. What it proposes
depends on what other sequences wrote; what is generated never does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from services.draft.drafters.drafter import DrafterLimits, Proposal
from services.draft.events import FeatureRows
from services.draft.fan_out import FanOut
from services.draft.likely_verdicts import Continuation, RankShares, likely_verdicts, rank_of
from services.draft.sequence import DraftSequence, SequenceKey
from shared.ngram import Cursor, NgramIndex, NgramOptions
from shared.tokens import TokenTree, TreeShape, Verdict

_CHOICES = TreeShape(num_steps=1, topk=16, num_draft_tokens=17)
"""The candidates after a node: trees of one level."""


@dataclass(frozen=True, slots=True)
class _InFlight:
    sequence: DraftSequence
    tree: TokenTree
    shape: TreeShape
    fan_out: FanOut


class NgramLookahead:
    """See `Lookahead`.

    Args:
        current: returns a sequence's cursor with every committed token taken in.
    """

    def __init__(self, index: NgramIndex, current: Callable[[DraftSequence], Cursor]) -> None:
        self.budget = 0
        self._index = index
        self._current = current
        self._shares = RankShares()
        self._in_flight: dict[SequenceKey, _InFlight] = {}

    @property
    def has_work(self) -> bool:
        return bool(self._in_flight)

    def begin(
        self, sequence: DraftSequence, tree: TokenTree, shape: TreeShape, fan_out: FanOut
    ) -> None:
        self._in_flight[sequence.key] = _InFlight(sequence, tree, shape, fan_out)

    def resume(self, sequence: DraftSequence, shape: TreeShape) -> bool:
        """A new tree costs no more than an old one."""
        return False

    def drop(self, sequence: DraftSequence) -> None:
        """Forgets a sequence: a verdict fell, or it ended."""
        self._in_flight.pop(sequence.key, None)

    def advance(self) -> list[Proposal]:
        """Prepares for one sequence's verdicts."""
        if not self._in_flight:
            return []
        return list(self._prepare(self._in_flight.pop(next(iter(self._in_flight)))))

    def observe(self, cursor: Cursor, token_ids: Sequence[int]) -> None:
        """Learns which of its choices the target took.

        Args:
            cursor: of the text before the verdict.
            token_ids: what the verdict commits.
        """
        for token in token_ids:
            choices = self._choices(cursor)
            if not choices or not self._index.is_current(cursor):
                return
            self._shares.observe(rank_of(choices, token))
            cursor = self._index.supposed(cursor, token)

    def _prepare(self, in_flight: _InFlight) -> Iterator[Proposal]:
        cursors = [self._current(in_flight.sequence)]
        for parent, token in zip(
            in_flight.tree.parent_indices, in_flight.tree.token_ids, strict=True
        ):
            above = cursors[0 if parent is None else parent + 1]
            cursors.append(self._index.supposed(above, token))
        choices = [self._choices(cursor) for cursor in cursors]
        for each in likely_verdicts(in_flight.tree, choices, self._shares, in_flight.fan_out):
            cursor = self._index.supposed(cursors[each.place], each.token)
            tree = self._index.grow_ahead(cursor, in_flight.shape)
            yield Proposal(in_flight.sequence, tree, each.condition)

    def _choices(self, cursor: Cursor) -> list[Continuation]:
        tree = self._index.grow_ahead(cursor, _CHOICES)
        return list(zip(tree.token_ids, tree.log_probs, strict=True))


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
