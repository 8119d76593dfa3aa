"""Pages of branches, and the keys and values that wait to be copied into them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

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
