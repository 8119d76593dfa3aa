"""KV bookkeeping of one sequence in a draft model: which of its tokens are computed, and where.

*Index* counts from the sequence's window: index i is committed token `window_start + i`, and it is
also the token's rotary position and its logical place in the KV cache. Committed tokens take the
indices `[0, num_computed)`; the rows of grown trees follow them as its tail.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from services.draft.drafters.tail import Tail
from services.draft.sequence import DraftSequence
from shared.kv.leases import KvBranch, KvLease, KvLeases
from shared.runtime.open_sequence import OpenSequence
from shared.tokens import SamplingParams


@dataclass(frozen=True, slots=True, eq=False)
class BranchKv:
    """Pages in which a sequence may go on.

    Attributes:
        own: those that are the branch's alone.
        pages: all of them, in logical order.
        num_computed: indices below it hold committed tokens, if the branch's verdict falls.
    """

    own: KvBranch
    pages: list[int]
    num_computed: int

    def sequence(self, token_id: int, *, num_before: int, sampling: SamplingParams) -> OpenSequence:
        """Lays out the token that ends the branch's verdict; see `OpenSequence`."""
        return OpenSequence(
            token_ids=(token_id,),
            num_computed=self.num_computed - 1,
            num_before=num_before,
            sampling=sampling,
            pages=self.pages,
        )


class BranchPages:
    """Gives branches over one page pool their pages.

    Args:
        max_context_tokens: no branch reaches beyond it.
    """

    def __init__(self, leases: KvLeases, *, max_context_tokens: int) -> None:
        self._leases = leases
        self._max_context_tokens = max_context_tokens
        # Source slot of each slot that is to be overwritten.
        self._moves: dict[int, int] = {}

    def branch(
        self, lease: KvLease, pages: Sequence[int], base: int, path: Sequence[int], num_rows: int
    ) -> BranchKv | None:
        """Returns pages in which computed tokens and a path behind them are followed by room for a
        token and a tree; None where there are none left, or the context ends before that.

        Args:
            pages: of the lease, or of another branch of it.
            base: indices below it hold the computed tokens.
            path: rows behind them.
            num_rows: of the tree.
        """
        num_computed = base + len(path) + 1
        # A pass counts the token that it finds behind its last row.
        if num_computed + max(num_rows, 1) > self._max_context_tokens:
            return None
        own = self._leases.try_branch(lease, base, num_computed + num_rows)
        if own is None:
            return None
        start = own.first_page * self._leases.page_size
        sources = [*range(start, base), *(base + row for row in path)]
        branch = BranchKv(own, [*pages[: own.first_page], *own.pages], num_computed)
        self.copy(pages, sources, branch.pages, range(start, start + len(sources)))
        return branch

    def copy(
        self, pages: Sequence[int], sources: Iterable[int],
        other_pages: Sequence[int], targets: Iterable[int],
    ) -> None:  # fmt: skip
        """Adds copies from indices to indices to those that wait, which later ones may build on."""
        moves = self._moves
        # Slots of other branches may themselves be yet to be copied.
        found = [moves.get(slot, slot) for slot in self._slots(pages, sources)]
        moves.update(zip(self._slots(other_pages, targets), found, strict=True))

    def take_moves(self) -> list[tuple[int, int]]:
        """Returns the (source, target) slots to copy before the next forward, as if all were read
        before any is written, and forgets them."""
        moves, self._moves = self._moves, {}
        return [(source, target) for target, source in moves.items()]

    def _slots(self, pages: Sequence[int], indices: Iterable[int]) -> list[int]:
        size = self._leases.page_size
        return [pages[index // size] * size + index % size for index in indices]


@dataclass(slots=True, eq=False)
class SequenceKv:
    """Pages of one sequence and what is computed in them.

    Attributes:
        window_start: committed token that has index 0.
        num_computed: indices below it hold the KV of committed tokens.
        tail: what is computed behind them, until another forward overwrites it.
    """

    lease: KvLease
    window_start: int
    num_computed: int
    tail: Tail | None = None
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
        self._branches = BranchPages(leases, max_context_tokens=max_context_tokens)

    def open(self, sequence: DraftSequence) -> SequenceKv:
        """Starts a sequence on the longest cached prefix of its window."""
        start = 0
        if sequence.num_tokens > self._max_window_tokens:
            start = sequence.num_tokens - max(self._max_window_tokens // 2, 1)
        lease = self.leases.open(sequence.token_ids[start:], sequence.cache_salt)
        return SequenceKv(lease, start, lease.num_cached_tokens)

    def commit(self, kv: SequenceKv, sequence: DraftSequence) -> SequenceKv:
        """Takes new tokens in; keeps the KV of those the last tree foresaw.

        Returns the sequence's KV, a new one when the window had to slide.
        """
        self._keep_accepted(kv, sequence.token_ids[kv.window_start + kv.num_computed :])
        return self._slid(kv, sequence)

    def branch(
        self, kv: SequenceKv, behind: BranchKv | None, path: Sequence[int], num_rows: int
    ) -> BranchKv | None:
        """Returns pages for a token and a tree behind a path, see `BranchPages`; None also where
        there is no tail any more.

        Args:
            behind: another branch of the sequence; None is the sequence itself.
            path: rows of its tail.
            num_rows: of the tree.
        """
        if behind is not None:
            base, pages = behind.num_computed, behind.pages
        elif kv.tail is not None:
            base, pages = kv.tail.base, kv.lease.pages
        else:
            return None
        return self._branches.branch(kv.lease, pages, base, path, num_rows)

    def adopt(self, kv: SequenceKv, sequence: DraftSequence, branch: BranchKv) -> SequenceKv:
        """Goes on in a branch where all committed tokens are computed; see `commit`."""
        self.leases.adopt(kv.lease, branch.own)
        kv.num_computed, kv.tail = sequence.num_tokens - kv.window_start, None
        return self._slid(kv, sequence)

    def _slid(self, kv: SequenceKv, sequence: DraftSequence) -> SequenceKv:
        if sequence.num_tokens - kv.window_start <= self._max_window_tokens:
            return kv
        self.close(kv, sequence)
        return self.open(sequence)

    def reserve(self, kv: SequenceKv, sequence: DraftSequence, num_tail_rows: int) -> bool:
        """Whether the window and a tree of that many rows fit; nothing changed if not."""
        num_rows = sequence.num_tokens - kv.window_start + num_tail_rows
        return self.leases.try_grow(kv.lease, num_rows)

    def publish(self, kv: SequenceKv, sequence: DraftSequence) -> None:
        """Shares the computed tokens with other sequences, once."""
        if not kv.is_published:
            kv.is_published = True
            self.leases.publish(kv.lease, _computed(kv, sequence))

    def close(self, kv: SequenceKv, sequence: DraftSequence) -> None:
        self.leases.close(kv.lease, _computed(kv, sequence))

    def reserve_tail(self, kv: SequenceKv, num_rows: int) -> bool:
        """Makes room for that many rows behind the tail's; False when there is none."""
        assert kv.tail is not None
        return self.leases.try_grow(kv.lease, kv.tail.base + kv.tail.num_rows + num_rows)

    def take_moves(self) -> list[tuple[int, int]]:
        """See `BranchPages.take_moves`."""
        return self._branches.take_moves()

    def _keep_accepted(self, kv: SequenceKv, token_ids: Sequence[int]) -> None:
        """The tokens decide, not the verdict's node indices: the verified tree may have been
        another one, and KV depends on nothing but the tokens before it."""
        tail = kv.tail
        if tail is None:
            return
        assert tail.base == kv.num_computed, "a tail outlived the tokens it hangs off"
        path = tail.match(token_ids)
        if path:
            self._move(kv, tail.base, tail.reroot(path[-1]))
        kv.num_computed += len(path)
        if len(path) < len(token_ids):
            # No tree was prepared for this path.
            kv.tail = None

    def _move(self, kv: SequenceKv, base: int, rows: Sequence[tuple[int, int]]) -> None:
        """Moves rows of the tail."""
        pages, moved = kv.lease.pages, [each for each in rows if each[0] != each[1]]
        self._branches.copy(
            pages, [base + source for source, _ in moved], pages, [base + to for _, to in moved]
        )


def _computed(kv: SequenceKv, sequence: DraftSequence) -> Sequence[int]:
    return sequence.token_ids[kv.window_start : kv.window_start + kv.num_computed]
