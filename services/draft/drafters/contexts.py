"""The committed rows of sequences in a draft model: their KV pages, and which rows are computed.

*Index* counts rows from the start of the sequence's window: index i is position `window_start + i`,
the row's rotary position and its logical place in the KV cache. Committed rows have the indices
`[0, num_computed)`. The rows of a drafted subtree follow them in the order in which they were
computed, so a parent's row is below its child's.
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
"""Tokens from the one after the last committed token to a node."""


class GrownRows:
    """The rows that a pass computed for a tree, looked up by token path.

    Attributes:
        tree: the best nodes. The less likely leaves among them have no computed row.
    """

    def __init__(self, grown: PassTree) -> None:
        self.tree = grown.tree
        self._levels, self._rows = grown.levels, grown.rows

    def longest_match(self, token_ids: Sequence[int]) -> tuple[int, ...]:
        """Returns the rows of the longest computed path that is a prefix of `token_ids`."""
        path = tuple(token_ids)
        while path not in self.rows_by_path:
            path = path[:-1]
        return self.rows_by_path[path]

    def continuations(self, path: Path) -> Sequence[Continuation]:
        """Returns the best tokens after a node, best first; empty for a node without a row."""
        rows = self.rows_by_path.get(path)
        return () if rows is None else self._rows.after(rows[-1] + 1 if rows else 0)

    def pass_row(self, path: Path) -> tuple[PassRows, int]:
        """Returns all rows of the pass, and the index among them of a computed node's row."""
        rows = self.rows_by_path[path]
        return self._rows, rows[-1] + 1 if rows else 0

    @cached_property
    def rows_by_path(self) -> dict[Path, tuple[int, ...]]:
        """The rows of each computed node's ancestors, then the node's own row."""
        # Computed when needed: most trees are for verdicts that never arrive.
        rows_by_path: dict[Path, tuple[int, ...]] = {(): ()}
        parent_paths: list[Path] = [()]
        row = 0
        for token_ids, parents in self._levels:
            paths = [
                (*parent_paths[parent], token)
                for token, parent in zip(token_ids, parents, strict=True)
            ]
            for path in paths:
                rows_by_path.setdefault(path, (*rows_by_path[path[:-1]], row))
                row += 1
            parent_paths = paths
        return rows_by_path


CONTEXT_MARGIN = 33
"""Rows of the context that stay free for the deepest tree and its root."""


@dataclass(slots=True, eq=False)
class SequenceKv:
    """The KV pages of one sequence and which rows are computed in them.

    Attributes:
        window_start: position of the row with index 0.
        num_computed: number of committed rows whose KV is computed.
        subtree: the drafted subtree after the committed rows; None once it is overwritten.
    """

    lease: KvLease
    window_start: int
    num_computed: int
    subtree: GrownRows | None = None
    is_published: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class BranchKv:
    """The KV pages of a branch: the sequence continues in them if the branch's verdict arrives.

    Attributes:
        own: the pages that only the branch uses.
        pages: shared and own pages, in logical order.
        num_computed: number of committed rows, once the branch's verdict has arrived.
    """

    own: KvBranch
    pages: list[int]
    num_computed: int


class Contexts(ABC):
    """Opens, fills, slides and closes the contexts of sequences over one page pool.

    A sequence that outgrows the model's context starts over with the younger half of it. So each
    row is computed twice at most, and never at a position that the model was not trained for.

    Attributes:
        max_rows: most rows of a sequence that needs no window.
        token_offset: the row of position p reads the token at p + `token_offset`.
        keeps_tree_rows: whether rows of a tree stay valid when a verdict commits their tokens.
    """

    token_offset: ClassVar[int]
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
        self.max_rows = max_context_tokens - margin_tokens
        self._kv: dict[SequenceKey, SequenceKv] = {}
        # Pending copies of keys and values: the source slot of each slot to overwrite.
        self._moves: dict[int, int] = {}

    @property
    def num_kept_rows(self) -> int:
        """Rows that a new window starts with."""
        return max(self.max_rows // 2, 1)

    def open(self, sequence: DraftSequence) -> None:
        """Starts a sequence on the longest cached prefix of its window."""
        num_rows = sequence.num_tokens - self.token_offset
        self._open_at(sequence, num_rows - self.num_kept_rows if num_rows > self.max_rows else 0)

    def close(self, sequence: DraftSequence) -> None:
        """Frees a sequence's pages; its computed rows stay in the prefix cache."""
        kv = self._kv.pop(sequence.key)
        self.leases.close(kv.lease, self._cache_keys(sequence, kv.window_start, kv.num_computed))

    def kv_of(self, sequence: DraftSequence) -> SequenceKv:
        """Returns the KV pages of a sequence and which rows are computed in them."""
        return self._kv[sequence.key]

    def num_window_rows(self, sequence: DraftSequence) -> int:
        """Returns the number of committed rows from the window's start on, computed or not."""
        window_start = self.kv_of(sequence).window_start
        return max(sequence.num_tokens - self.token_offset - window_start, 0)

    @abstractmethod
    def backlog(self, sequence: DraftSequence) -> int:
        """Returns the number of committed rows that are not computed but could be."""

    @abstractmethod
    def is_complete(self, sequence: DraftSequence) -> bool:
        """Whether all inputs of a tree after the last committed token are here."""

    def reserve(self, sequence: DraftSequence, num_tree_rows: int) -> bool:
        """Reserves pages for committed rows and a tree; False, changing nothing, if too few."""
        num_rows = self.num_window_rows(sequence) + num_tree_rows
        return self.leases.try_grow(self.kv_of(sequence).lease, num_rows)

    @abstractmethod
    def compute_rows(self, counts: Sequence[tuple[DraftSequence, int]]) -> None:
        """Computes the next `count` committed rows of each sequence."""

    def open_pass(
        self, sequences: Sequence[DraftSequence], max_rows: int
    ) -> tuple[list[OpenSequence], list[Tensor]]:
        """Lays out a pass over the committed rows that are left, and counts them as computed.
        Returns the rows, and the tensors that they read besides tokens, end to end.

        Args:
            max_rows: most rows of a sequence in the pass; rows beyond that are computed before it.
        """
        counts = [(sequence, self.backlog(sequence)) for sequence in sequences]
        excess = [(sequence, count - max_rows) for sequence, count in counts if count > max_rows]
        if excess:
            self.compute_rows(excess)
        sources = self.sources([(sequence, min(count, max_rows)) for sequence, count in counts])
        rows = [self._open_sequence(sequence) for sequence in sequences]
        self.apply_moves()
        return rows, sources

    def sources(self, counts: Sequence[tuple[DraftSequence, int]]) -> list[Tensor]:
        """Returns the tensors that the next rows of each sequence read besides tokens, in order."""
        return []

    def settle(self, sequence: DraftSequence) -> None:
        """Call when all committed rows are computed or queued: shares them with other sequences."""
        kv = self.kv_of(sequence)
        if not kv.is_published:
            kv.is_published = True
            keys = self._cache_keys(sequence, kv.window_start, kv.num_computed)
            self.leases.publish(kv.lease, keys)

    def set_subtree(self, sequence: DraftSequence, rows: GrownRows) -> None:
        """Records the subtree computed after the last committed token, if its rows stay valid."""
        if self.keeps_tree_rows:
            self.kv_of(sequence).subtree = rows

    def branch(
        self, sequence: DraftSequence, parent: BranchKv | None, path: Sequence[int], num_rows: int
    ) -> BranchKv | None:
        """Returns the pages of a new branch: they hold the parent's committed rows and the rows of
        a path, and have room for the bonus token and a tree. None where no pages are left, or the
        context would be exceeded.

        Args:
            parent: another branch of the sequence; None is the sequence itself.
            path: rows of the accepted nodes in the parent's subtree.
            num_rows: number of rows of the branch's tree.
        """
        kv = self.kv_of(sequence)
        if parent is None:
            base, pages = kv.num_computed, kv.lease.pages
        else:
            base, pages = parent.num_computed, parent.pages
        num_computed = base + len(path) + 1
        # A pass counts the token after its last row, too.
        if num_computed + max(num_rows, 1) > self._max_context_tokens:
            return None
        own = self.leases.try_branch(kv.lease, base, num_computed + num_rows)
        if own is None:
            return None
        start = own.first_page * self.leases.page_size
        sources = [*range(start, base), *(base + row for row in path)]
        branch = BranchKv(own, [*pages[: own.first_page], *own.pages], num_computed)
        self._add_moves(pages, sources, branch.pages, range(start, start + len(sources)))
        return branch

    def branch_sequence(
        self, sequence: DraftSequence, branch: BranchKv, token_id: int
    ) -> OpenSequence:
        """Lays out the row of the bonus token of a branch's verdict."""
        return OpenSequence(
            token_ids=(token_id,),
            num_computed=branch.num_computed - 1,
            num_before=self.kv_of(sequence).window_start + self.token_offset - 1,
            sampling=sequence.pass_sampling,
            pages=branch.pages,
        )

    def apply_moves(self) -> None:
        """Copies the keys and values of all pending moves, as if all sources were read before any
        target is written. Due before any forward that may read the targets."""
        moves, self._moves = self._moves, {}
        if moves:
            self._move_slots([(source, target) for target, source in moves.items()])

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
        num_rows = max(sequence.num_tokens - self.token_offset - window_start, 0)
        keys = self._cache_keys(sequence, window_start, num_rows)
        lease = self.leases.open(keys, sequence.cache_salt)
        self._kv[sequence.key] = SequenceKv(lease, window_start, lease.num_cached_tokens)

    def _restart(self, sequence: DraftSequence, window_start: int) -> None:
        """Replaces the window by one that starts at the row of position `window_start`."""
        Contexts.close(self, sequence)
        self._open_at(sequence, window_start)

    def _open_sequence(self, sequence: DraftSequence) -> OpenSequence:
        """Lays out all committed rows that are left and counts them as computed."""
        kv = self.kv_of(sequence)
        start, kv.num_computed = kv.num_computed, self.num_window_rows(sequence)
        kv.subtree = None
        return OpenSequence(
            token_ids=sequence.token_ids[kv.window_start + start + self.token_offset :],
            num_computed=start,
            num_before=kv.window_start + self.token_offset - 1,
            sampling=sequence.pass_sampling,
            pages=kv.lease.pages,
        )

    def _next_rows(self, sequence: DraftSequence, count: int) -> SequenceRows:
        """Lays out the next `count` rows and counts them as computed."""
        kv = self.kv_of(sequence)
        start, kv.subtree = kv.num_computed, None
        first_token = kv.window_start + start + self.token_offset
        kv.num_computed += count
        return SequenceRows.causal(
            sequence.token_ids[first_token : first_token + count], start, kv.lease.pages
        )

    @abstractmethod
    def _cache_keys(self, sequence: DraftSequence, window_start: int, count: int) -> Sequence[int]:
        """Returns the prefix cache keys of the first `count` rows of a window."""

    def _move_slots(self, moves: Sequence[tuple[int, int]]) -> None:
        """Copies keys and values from source slots to target slots."""
        self._pool.move(*uploaded_pairs(moves, self._pool.device))

    def _add_moves(
        self, pages: Sequence[int], sources: Iterable[int],
        target_pages: Sequence[int], targets: Iterable[int],
    ) -> None:  # fmt: skip
        """Adds copies from source indices to target indices to the pending moves. Sources may be
        the targets of earlier pending moves."""
        moves = self._moves
        source_slots = [moves.get(slot, slot) for slot in self._slots(pages, sources)]
        moves.update(zip(self._slots(target_pages, targets), source_slots, strict=True))

    def _slots(self, pages: Sequence[int], indices: Iterable[int]) -> list[int]:
        size = self.leases.page_size
        return [pages[index // size] * size + index % size for index in indices]


class ContextDrafter(Drafter):
    """A drafter that computes its trees after the committed rows of `Contexts`."""

    _contexts: Contexts

    @property
    @abstractmethod
    def _round_model(self) -> RoundModel | None:
        """The model as a target's rounds use it; None where it takes part in no rounds."""

    def share_head(self) -> SharedHead | None:
        model, contexts = self._round_model, self._contexts
        if model is None:
            return None
        return SharedHead.leased(model, contexts.leases, max_context_tokens=contexts.max_rows)

    def open(self, sequence: DraftSequence) -> None:
        self._contexts.open(sequence)

    def backlog(self, sequence: DraftSequence) -> int:
        return self._contexts.backlog(sequence)

    def catch_up(self, sequences: Sequence[DraftSequence], max_tokens: int) -> int:
        chunk: list[tuple[DraftSequence, int]] = []
        num_computed = 0
        for sequence in sequences:
            count = min(self.backlog(sequence) - self._num_open_rows, max_tokens - num_computed)
            if count > 0:
                chunk.append((sequence, count))
                num_computed += count
        if chunk:
            self._compute_rows(chunk)
        return num_computed

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
        """Committed rows that only a proposal computes: a tree needs the last row's logits."""
        return 1

    def _compute_rows(self, counts: Sequence[tuple[DraftSequence, int]]) -> None:
        """Computes the next committed rows of each sequence."""
        self._contexts.compute_rows(counts)

    @abstractmethod
    def _propose(self, sequences: Sequence[DraftSequence], shape: TreeShape) -> list[Proposal]:
        """Proposes for complete sequences."""
