"""KV bookkeeping of one sequence in a draft model: which of its tokens are computed, and where.

*Index* counts from the sequence's window: index i is committed token `window_start + i`, and it is
also the token's rotary position and its logical place in the KV cache. Committed tokens take the
indices `[0, num_computed)`; the rows of a grown tree follow them as its tail.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from services.draft.sequence import DraftSequence
from shared.kv.leases import KvLease, KvLeases


@dataclass(slots=True)
class GrownRows:
    """Computed rows of the last tree, the r-th at index `base + r`.

    Attributes:
        base: tokens committed when the tree was grown.
        rows: row of each (parent row, token); the parent is None below the last committed token.
    """

    base: int
    rows: dict[tuple[int | None, int], int] = field(default_factory=dict)

    @property
    def num_rows(self) -> int:
        return len(self.rows)

    def add(self, parent: int | None, token: int) -> int:
        """Appends a row; returns its number."""
        row = len(self.rows)
        self.rows[parent, token] = row
        return row

    def match(self, token_ids: Sequence[int]) -> list[int]:
        """Returns the rows of the longest path whose tokens begin `token_ids`."""
        path: list[int] = []
        parent: int | None = None
        for token in token_ids:
            row = self.rows.get((parent, token))
            if row is None:
                break
            path.append(row)
            parent = row
        return path


@dataclass(slots=True, eq=False)
class SequenceKv:
    """Pages of one sequence and what is computed in them.

    Attributes:
        window_start: committed token that has index 0.
        num_computed: indices below it hold the KV of committed tokens.
        grown: the last tree's rows, until a verdict or another forward overwrites them.
    """

    lease: KvLease
    window_start: int
    num_computed: int
    grown: GrownRows | None = None
    is_published: bool = False


class DraftKv:
    """Opens, extends, compacts and closes the KV of sequences over one page pool.

    A sequence that outgrows the draft's context starts over with the younger half of it, so each
    token is computed twice at most, and never at a position the model was not trained for.
    """

    def __init__(self, leases: KvLeases, *, max_context_tokens: int, margin_tokens: int) -> None:
        """`margin_tokens` of the context stay free for the tree."""
        assert max_context_tokens > margin_tokens + 1, "no room for a context beside the tree"
        self.leases = leases
        self._max_window_tokens = max_context_tokens - margin_tokens
        self._moves: list[tuple[int, int]] = []

    def open(self, sequence: DraftSequence) -> SequenceKv:
        """Starts a sequence on the longest cached prefix of its window."""
        start = 0
        if sequence.num_tokens > self._max_window_tokens:
            start = sequence.num_tokens - max(self._max_window_tokens // 2, 1)
        lease = self.leases.open(sequence.token_ids[start:])
        return SequenceKv(lease, start, lease.num_cached_tokens)

    def commit(self, kv: SequenceKv, sequence: DraftSequence, num_committed: int) -> SequenceKv:
        """Takes `num_committed` new tokens in; keeps the KV of those the last tree foresaw.

        Returns the sequence's KV, a new one when the window had to slide.
        """
        self._keep_accepted(kv, sequence.token_ids[-num_committed:])
        if sequence.num_tokens - kv.window_start <= self._max_window_tokens:
            return kv
        self.close(kv, sequence)
        return self.open(sequence)

    def reserve(self, kv: SequenceKv, sequence: DraftSequence, num_tail_rows: int) -> None:
        """Raises:
        OutOfPages: the window and a tree of that many rows do not fit; nothing changed.
        """
        self.leases.grow(kv.lease, sequence.num_tokens - kv.window_start + num_tail_rows)

    def publish(self, kv: SequenceKv, sequence: DraftSequence) -> None:
        """Shares the computed tokens with other sequences, once."""
        if not kv.is_published:
            kv.is_published = True
            self.leases.publish(kv.lease, _computed(kv, sequence))

    def close(self, kv: SequenceKv, sequence: DraftSequence) -> None:
        self.leases.close(kv.lease, _computed(kv, sequence))

    def take_moves(self) -> list[tuple[int, int]]:
        """Returns the (source, target) slots to copy before the next forward, and forgets them."""
        moves, self._moves = self._moves, []
        return moves

    def _keep_accepted(self, kv: SequenceKv, token_ids: Sequence[int]) -> None:
        """The tokens decide, not the verdict's node indices: the verified tree may have been
        another one, and KV depends on nothing but the tokens before it."""
        grown, kv.grown = kv.grown, None
        if grown is None:
            return
        assert grown.base == kv.num_computed, "a tree outlived the tokens it hangs off"
        # The last token stays to be computed: the next tree grows from its logits.
        rows = grown.match(token_ids[:-1])
        for offset, row in enumerate(rows):
            if row != offset:
                self._moves.append(
                    (self._slot(kv, grown.base + row), self._slot(kv, grown.base + offset))
                )
        kv.num_computed += len(rows)

    def _slot(self, kv: SequenceKv, index: int) -> int:
        page_size = self.leases.page_size
        return kv.lease.pages[index // page_size] * page_size + index % page_size


def _computed(kv: SequenceKv, sequence: DraftSequence) -> Sequence[int]:
    return sequence.token_ids[kv.window_start : kv.window_start + kv.num_computed]
