"""Drafts by looking up which tokens followed the same n-gram before: no model, no torch.

One index holds the n-grams of every sequence that this worker has seen (prompts and outputs) and of
an optional corpus, so a text that was generated once is proposed the next time. The proposals
depend on the texts of other sequences; the generated tokens never do.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from services.draft.drafters.drafter import (
    Drafter,
    DrafterLimits,
    OneStepLookahead,
    Proposal,
    VerifiedTree,
)
from services.draft.events import FeatureRows
from services.draft.likely_verdicts import Continuation, likely_verdicts, rank_of
from services.draft.sequence import DraftSequence, SequenceKey
from shared.ngram import Cursor, NgramIndex, NgramOptions, Text
from shared.tokens import TokenTree, TreeShape, Verdict

_CHOICES = TreeShape(num_steps=1, topk=16, num_draft_tokens=17)
"""Shape of the continuations after a node: a tree of one level."""
_LIMITS = DrafterLimits(num_ready_tokens=4096)
"""The index takes in as many tokens within a millisecond."""


class NgramLookahead(OneStepLookahead):
    """Looks up a tree for each likely verdict; see `Lookahead`.

    Args:
        cursors: cursors of the open sequences.
    """

    def __init__(self, index: NgramIndex, cursors: Mapping[SequenceKey, Cursor]) -> None:
        super().__init__()
        self._index = index
        self._cursors = cursors

    def advance(self) -> list[Proposal]:
        """Prepares for one sequence's verdicts."""
        return list(self._prepare(self._next())) if self._verified else []

    def observe(self, sequence: DraftSequence, num_committed: int) -> None:
        """Counts the ranks of the choices that the target took. The index must not have taken in
        the committed tokens yet."""
        token_ids = sequence.token_ids
        positions = range(len(token_ids) - num_committed, len(token_ids))
        first = max(positions.start - self._index.context_tokens, 0)
        texts = [token_ids[first:position] for position in positions]
        for position, choices in zip(positions, self._choices(sequence, texts), strict=True):
            if choices:
                self._shares.observe(rank_of(choices, token_ids[position]))

    def _prepare(self, verified: VerifiedTree) -> Iterator[Proposal]:
        sequence, tree = verified.sequence, verified.tree
        self._index.take_in([(self._cursors[sequence.key], sequence.token_ids)])
        texts = [self._end_of(sequence.token_ids)]
        for parent, token in zip(tree.parent_indices, tree.token_ids, strict=True):
            texts.append([*texts[0 if parent is None else parent + 1], token])
        choices = self._choices(sequence, texts)
        verdicts = likely_verdicts(tree, choices, self._shares, verified.budget)
        ends = [[*texts[verdict.tree_row], verdict.token] for verdict in verdicts]
        trees = self._grow(sequence, ends, verified.shape)
        for verdict, next_tree in zip(verdicts, trees, strict=True):
            yield Proposal(sequence, next_tree, verdict.condition)

    def _choices(
        self, sequence: DraftSequence, texts: Iterable[list[int]]
    ) -> list[list[Continuation]]:
        trees = self._grow(sequence, texts, _CHOICES)
        return [list(zip(tree.token_ids, tree.log_probs, strict=True)) for tree in trees]

    def _grow(
        self, sequence: DraftSequence, texts: Iterable[list[int]], shape: TreeShape
    ) -> list[TokenTree]:
        seed = self._cursors[sequence.key].seed
        return self._index.grow_ahead(seed, map(self._end_of, texts), shape)

    def _end_of(self, token_ids: list[int]) -> list[int]:
        return token_ids[-self._index.context_tokens :]


class NgramDrafter(Drafter):
    """Drafts from an n-gram index. The state per sequence is a cursor into the shared index, which
    evicts n-grams by age and has no pages."""

    def __init__(self, options: NgramOptions) -> None:
        self._index = NgramIndex(options)
        self._cursors: dict[SequenceKey, Cursor] = {}
        self._lookahead = NgramLookahead(self._index, self._cursors)

    @property
    def lookahead(self) -> NgramLookahead:
        return self._lookahead

    @property
    def limits(self) -> DrafterLimits:
        return _LIMITS

    def learn(self, token_ids: Sequence[int]) -> None:
        """Adds a text of the corpus to the index."""
        self._index.take_in([(Cursor(), token_ids)])

    def open(self, sequence: DraftSequence) -> None:
        self._cursors[sequence.key] = Cursor.of(sequence.cache_salt)

    def commit(
        self, sequence: DraftSequence, verdict: Verdict, features: FeatureRows | None
    ) -> None:
        """Observes a verdict; the next proposal takes its tokens into the index."""
        self._lookahead.drop(sequence)
        num_committed = len(verdict.committed_token_ids)
        if self._lookahead.budget and self.backlog(sequence) == num_committed:
            self._lookahead.observe(sequence, num_committed)

    def backlog(self, sequence: DraftSequence) -> int:
        return sequence.num_tokens - self._cursors[sequence.key].num_seen

    def reserve(self, sequence: DraftSequence, shape: TreeShape) -> bool:
        return True

    def catch_up(self, sequences: Sequence[DraftSequence], max_tokens: int) -> int:
        num_taken = 0
        texts: list[Text] = []
        for sequence in sequences:
            limit = min(self.backlog(sequence), max_tokens - num_taken)
            cursor = self._cursors[sequence.key]
            texts.append((cursor, sequence.token_ids[: cursor.num_seen + limit]))
            num_taken += limit
        self._index.take_in(texts)
        return num_taken

    def propose(self, sequences: Sequence[DraftSequence], shape: TreeShape) -> list[Proposal]:
        texts = [(self._cursors[sequence.key], sequence.token_ids) for sequence in sequences]
        trees = self._index.grow(texts, shape)
        return [Proposal(*pair) for pair in zip(sequences, trees, strict=True)]

    def close(self, sequence: DraftSequence) -> None:
        self._lookahead.drop(sequence)
        # Later sequences draft from the last committed tokens, too.
        self._index.take_in([(self._cursors.pop(sequence.key), sequence.token_ids)])

    def gauges(self) -> Mapping[str, float]:
        return {
            "held_token_count": float(self._index.num_tokens),
            "forgotten_token_count": float(self._index.num_forgotten),
        }

    def check(self) -> None:
        self._index.check()
