"""The committed rows of sequences in a draft model: their pages, and what is computed in them.

*Index* counts rows from the sequence's window: index i is position `window_start + i`, and it is
also the row's rotary position and its logical place in the KV cache. Committed rows take the
indices `[0, num_computed)`; the rows of grown trees follow them as its tail, in the order in which
they were computed, so a parent's is below its child's.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

from torch import Tensor

from services.draft.drafters.drafter import Drafter, Proposal, SharedHead
from services.draft.likely_verdicts import Continuation
from services.draft.sequence import DraftSequence, SequenceKey
from shared.kv.batch import SequenceRows
from shared.kv.leases import KvBranch, KvLease, KvLeases
from shared.kv.pool import KvPool
from shared.kv.upload import uploaded_pairs
from shared.runtime.tree_model import RoundModel
from shared.runtime.tree_pass import OpenSequence, PassRows, PassTree
from shared.tokens import EMPTY_TREE, TreeShape

Path = tuple[int, ...]
"""Tokens behind the last committed one."""


class GrownRows:
    """What a pass has computed, by the tokens on the way to each row.

    Attributes:
        tree: the best nodes, whose rows are here but for the less likely leaves.
    """

    def __init__(self, grown: PassTree) -> None:
        self.tree = grown.tree
        self._levels, self._rows = grown.levels, grown.rows

    def line(self, path: Path) -> tuple[int, ...]:
        """Returns the rows on the way to a computed node, its own last."""
        return self._lines[path]

    def matched(self, token_ids: Sequence[int]) -> tuple[int, ...]:
        """Returns the rows of the longest path whose tokens begin `token_ids`."""
        path = tuple(token_ids)
        while path not in self._lines:
            path = path[:-1]
        return self._lines[path]

    def after(self, path: Path) -> Sequence[Continuation]:
        """Returns the best tokens after a node, best first; none after one that is not computed."""
        line = self._lines.get(path)
        return () if line is None else self._rows.after(line[-1] + 1 if line else 0)

    def row(self, path: Path) -> tuple[PassRows, int]:
        """Returns the row of a computed node among all that its pass computed."""
        line = self._lines[path]
        return self._rows, line[-1] + 1 if line else 0

    @cached_property
    def _lines(self) -> dict[Path, tuple[int, ...]]:
        # Most trees are for verdicts that do not fall, and nobody asks for their rows.
        lines: dict[Path, tuple[int, ...]] = {(): ()}
        above: list[Path] = [()]
        row = 0
        for token_ids, parents in self._levels:
            paths = [
                (*above[place], token) for token, place in zip(token_ids, parents, strict=True)
            ]
            for path in paths:
                lines.setdefault(path, (*lines[path[:-1]], row))
                row += 1
            above = paths
        return lines


CONTEXT_MARGIN = 33
"""Rows of the context kept for the deepest tree and the row it hangs off."""


@dataclass(slots=True, eq=False)
class SequenceKv:
    """Pages of one sequence and what is computed in them.

    Attributes:
        window_start: position of the row that has index 0.
        num_computed: indices below it hold the KV of committed rows.
        tail: what is computed behind them, until another forward overwrites it.
    """

    lease: KvLease
    window_start: int
    num_computed: int
    tail: GrownRows | None = None
    is_published: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class BranchKv:
    """Pages in which a sequence may go on.

    Attributes:
        own: those that are the branch's alone.
        pages: all of them, in logical order.
        num_computed: indices below it hold committed rows, if the branch's verdict falls.
    """

    own: KvBranch
    pages: list[int]
    num_computed: int


class Contexts(ABC):
    """Opens, fills, slides and closes the contexts of sequences over one page pool.

    A sequence that outgrows the model's context starts over with the younger half of it, so each
    row is computed twice at most, and never at a position the model was not trained for.

    Attributes:
        longest: rows of a sequence that needs no window.
        reads_ahead: how far the token that a row reads lies behind the row's own position.
        keeps_tree_rows: rows of a tree stay good when a verdict commits their tokens.
    """

    reads_ahead: ClassVar[int]
    keeps_tree_rows: ClassVar[bool]

    def __init__(
        self,
        pool: KvPool,
        leases: KvLeases,
        *,
        max_context_tokens: int,
        margin_tokens: int = CONTEXT_MARGIN,
    ) -> None:
        """`margin_tokens` of the context stay free for the tree."""
        assert max_context_tokens > margin_tokens, "no room for a context beside the tree"
        self.leases = leases
        self._pool = pool
        self._max_context_tokens = max_context_tokens
        self.longest = max_context_tokens - margin_tokens
        self._kv: dict[SequenceKey, SequenceKv] = {}
        # Source slot of each slot that is to be overwritten.
        self._moves: dict[int, int] = {}

    @property
    def num_kept_rows(self) -> int:
        """Rows a window starts over with."""
        return max(self.longest // 2, 1)

    def open(self, sequence: DraftSequence) -> None:
        """Starts a sequence on the longest cached prefix of its window."""
        num_rows = sequence.num_tokens - self.reads_ahead
        self._open_at(sequence, num_rows - self.num_kept_rows if num_rows > self.longest else 0)

    def close(self, sequence: DraftSequence) -> None:
        """Frees a sequence's pages; what is computed stays cached."""
        kv = self._kv.pop(sequence.key)
        self.leases.close(kv.lease, self._keys(sequence, kv.window_start, kv.num_computed))

    def kv_of(self, sequence: DraftSequence) -> SequenceKv:
        """Returns the pages of a sequence and what is computed in them."""
        return self._kv[sequence.key]

    def num_window_rows(self, sequence: DraftSequence) -> int:
        """Returns the committed rows from the window's start on, computed or not."""
        window_start = self.kv_of(sequence).window_start
        return max(sequence.num_tokens - self.reads_ahead - window_start, 0)

    @abstractmethod
    def backlog(self, sequence: DraftSequence) -> int:
        """Returns the committed rows that are not computed but could be."""

    @abstractmethod
    def is_complete(self, sequence: DraftSequence) -> bool:
        """Whether there is all that a tree behind the last committed token needs."""

    def reserve(self, sequence: DraftSequence, num_tail_rows: int) -> bool:
        """Makes room for the committed rows and a tree; False, with nothing changed, if there is
        none."""
        num_rows = self.num_window_rows(sequence) + num_tail_rows
        return self.leases.try_grow(self.kv_of(sequence).lease, num_rows)

    def publish(self, sequence: DraftSequence) -> None:
        """Shares the computed rows with other sequences, once."""
        kv = self.kv_of(sequence)
        if not kv.is_published:
            kv.is_published = True
            self.leases.publish(kv.lease, self._keys(sequence, kv.window_start, kv.num_computed))

    @abstractmethod
    def take_in(self, counts: Sequence[tuple[DraftSequence, int]]) -> None:
        """Computes the next committed rows of each sequence, as many as are counted."""

    def open_pass(
        self, sequences: Sequence[DraftSequence], most: int
    ) -> tuple[list[OpenSequence], list[Tensor]]:
        """Lays out all committed rows that are left and counts them as computed; returns with them
        what they read beside tokens, end to end.

        Args:
            most: rows of a sequence; those before them are computed.
        """
        counts = [(each, self.backlog(each)) for each in sequences]
        excess = [(each, count - most) for each, count in counts if count > most]
        if excess:
            self.take_in(excess)
        sources = self.sources([(each, min(count, most)) for each, count in counts])
        rows = [self._open_sequence(each) for each in sequences]
        self.move()
        return rows, sources

    def sources(self, counts: Sequence[tuple[DraftSequence, int]]) -> list[Tensor]:
        """Returns what the next rows of each sequence read beside tokens, piece by piece."""
        return []

    def settle(self, sequence: DraftSequence) -> None:
        """All committed rows are computed, or about to be."""
        self.publish(sequence)

    def plant(self, sequence: DraftSequence, rows: GrownRows) -> None:
        """Takes in what is computed behind the last committed token."""
        if self.keeps_tree_rows:
            self.kv_of(sequence).tail = rows

    def branch(
        self, sequence: DraftSequence, behind: BranchKv | None, path: Sequence[int], num_rows: int
    ) -> BranchKv | None:
        """Returns pages in which computed rows and a path behind them are followed by room for a
        token and a tree; None where there are none left, or the context ends before that.

        Args:
            behind: another branch of the sequence; None is the sequence itself.
            path: rows of the tree behind it.
            num_rows: of the tree.
        """
        kv = self.kv_of(sequence)
        if behind is None:
            base, pages = kv.num_computed, kv.lease.pages
        else:
            base, pages = behind.num_computed, behind.pages
        num_computed = base + len(path) + 1
        # A pass counts the token that it finds behind its last row.
        if num_computed + max(num_rows, 1) > self._max_context_tokens:
            return None
        own = self.leases.try_branch(kv.lease, base, num_computed + num_rows)
        if own is None:
            return None
        start = own.first_page * self.leases.page_size
        sources = [*range(start, base), *(base + row for row in path)]
        branch = BranchKv(own, [*pages[: own.first_page], *own.pages], num_computed)
        self._copy(pages, sources, branch.pages, range(start, start + len(sources)))
        return branch

    def branch_sequence(
        self, sequence: DraftSequence, branch: BranchKv, token_id: int
    ) -> OpenSequence:
        """Lays out the row of the token that ends the verdict of a branch."""
        return OpenSequence(
            token_ids=(token_id,),
            num_computed=branch.num_computed - 1,
            num_before=self.kv_of(sequence).window_start + self.reads_ahead - 1,
            sampling=sequence.pass_sampling,
            pages=branch.pages,
        )

    def move(self) -> None:
        """Moves the keys and values that wait to be, which is due before any forward that may read
        them: as if all were read before any is written."""
        moves, self._moves = self._moves, {}
        if moves:
            self._move([(source, target) for target, source in moves.items()])

    def gauges(self) -> Mapping[str, float]:
        """See `Drafter.gauges`."""
        leases = self.leases
        return {
            "page_count": float(leases.num_pages),
            "free_page_count": float(leases.num_free_pages),
            "cached_page_count": float(leases.num_cached_pages),
            "held_page_count": float(leases.num_held_pages),
        }

    def _open_at(self, sequence: DraftSequence, window_start: int) -> None:
        num_rows = max(sequence.num_tokens - self.reads_ahead - window_start, 0)
        keys = self._keys(sequence, window_start, num_rows)
        lease = self.leases.open(keys, sequence.cache_salt)
        self._kv[sequence.key] = SequenceKv(lease, window_start, lease.num_cached_tokens)

    def _restart(self, sequence: DraftSequence, window_start: int) -> None:
        """Gives the window up for one that starts at the row of position `window_start`."""
        Contexts.close(self, sequence)
        self._open_at(sequence, window_start)

    def _is_outgrown(self, sequence: DraftSequence) -> bool:
        return self.num_window_rows(sequence) > self.longest

    def _open_sequence(self, sequence: DraftSequence) -> OpenSequence:
        """Lays out all committed rows that are left and counts them as computed."""
        kv = self.kv_of(sequence)
        start, kv.num_computed = kv.num_computed, self.num_window_rows(sequence)
        kv.tail = None
        return OpenSequence(
            token_ids=sequence.token_ids[kv.window_start + start + self.reads_ahead :],
            num_computed=start,
            num_before=kv.window_start + self.reads_ahead - 1,
            sampling=sequence.pass_sampling,
            pages=kv.lease.pages,
        )

    def _next_rows(self, sequence: DraftSequence, count: int) -> SequenceRows:
        """Lays out the next `count` rows and counts them as computed."""
        kv = self.kv_of(sequence)
        start, kv.tail = kv.num_computed, None
        first_token = kv.window_start + start + self.reads_ahead
        kv.num_computed += count
        return SequenceRows.causal(
            sequence.token_ids[first_token : first_token + count], start, kv.lease.pages
        )

    @abstractmethod
    def _keys(self, sequence: DraftSequence, window_start: int, count: int) -> Sequence[int]:
        """Returns what the prefix cache knows the first `count` rows of a window by."""

    def _move(self, moves: Sequence[tuple[int, int]]) -> None:
        """Copies keys and values from slots to slots."""
        self._pool.move(*uploaded_pairs(moves, self._pool.device))

    def _copy(
        self, pages: Sequence[int], sources: Iterable[int],
        other_pages: Sequence[int], targets: Iterable[int],
    ) -> None:  # fmt: skip
        """Adds copies from indices to indices to those that wait, which later ones may build on."""
        moves = self._moves
        # Slots of other branches may themselves be yet to be copied.
        found = [moves.get(slot, slot) for slot in self._slots(pages, sources)]
        moves.update(zip(self._slots(other_pages, targets), found, strict=True))

    def _slots(self, pages: Sequence[int], indices: Iterable[int]) -> list[int]:
        size = self.leases.page_size
        return [pages[index // size] * size + index % size for index in indices]


class ContextDrafter(Drafter):
    """See `Drafter`. Computes trees behind contexts."""

    _contexts: Contexts

    @property
    @abstractmethod
    def _round_model(self) -> RoundModel | None:
        """The model as rounds of a target use it; None where it takes part in none."""

    def share_head(self) -> SharedHead | None:
        model, contexts = self._round_model, self._contexts
        if model is None:
            return None
        return SharedHead.of_most(model, contexts.leases, max_context_tokens=contexts.longest)

    def open(self, sequence: DraftSequence) -> None:
        self._contexts.open(sequence)

    def backlog(self, sequence: DraftSequence) -> int:
        return self._contexts.backlog(sequence)

    def catch_up(self, sequences: Sequence[DraftSequence], max_tokens: int) -> int:
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
        grown = self._propose(complete, shape) if complete else []
        return [*grown, *(Proposal(sequence, EMPTY_TREE) for sequence in waiting)]

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
        """Committed rows that only a proposal computes: the last one's logits start a tree."""
        return 1

    def _take_in(self, counts: Sequence[tuple[DraftSequence, int]]) -> None:
        """Computes the next committed rows of each sequence."""
        self._contexts.take_in(counts)

    @abstractmethod
    def _propose(self, sequences: Sequence[DraftSequence], shape: TreeShape) -> list[Proposal]:
        """Proposes for complete sequences."""
