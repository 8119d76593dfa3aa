"""KV bookkeeping of one sequence in a draft model: which of its tokens are computed, and where.

*Index* counts from the sequence's window: index i is committed token `window_start + i`, and it is
also the token's rotary position and its logical place in the KV cache. Committed tokens take the
indices `[0, num_computed)`; the rows of grown trees follow them as its tail.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

from services.draft.likely_verdicts import Continuation, rank_of
from services.draft.sequence import DraftSequence
from shared.kv.batch import SequenceRows
from shared.kv.leases import KvBranch, KvLease, KvLeases
from shared.runtime.tree_pass import OpenSequence
from shared.speculation.tree import Beam, BeamRows, Children
from shared.tokens import SamplingParams

# The drafted subtree behind the committed tokens of one sequence: a tree of rows.
#
# *Row r* of a tail is the KV at index `base + r`. Rows lie in the order they were computed, so a
# parent's is below its child's. When a verdict commits a path, the tree is rooted anew at the
# path's end: what hangs below it stays, moved to the front of the tail, and the rest is forgotten.


class TailNode:
    """A token that may follow.

    Attributes:
        token: for the root, the last committed token.
        parent: None for the root.
        depth: 0 for the root.
        log_prob: score given the parent, at most 0; 0 for the root.
        row: None for the root, and as long as the node is not computed.
        children: by token.
        continuations: the best tokens after it, best first; empty until it is computed.
        state: of a head's rows, `[H]`, which the rows of its children read.
    """

    __slots__ = (
        "children",
        "continuations",
        "depth",
        "log_prob",
        "parent",
        "row",
        "state",
        "token",
    )

    def __init__(self, token: int, parent: TailNode | None, log_prob: float) -> None:
        self.token = token
        self.parent = parent
        self.depth: int = 0 if parent is None else parent.depth + 1
        self.log_prob = log_prob
        self.row: int | None = None
        self.children: dict[int, TailNode] = {}
        self.continuations: tuple[Continuation, ...] = ()
        self.state: Tensor | None = None

    @property
    def is_computed(self) -> bool:
        return self.row is not None or self.parent is None

    @property
    def line(self) -> list[TailNode]:
        """The nodes from the root's child down to this one; none for the root."""
        line: list[TailNode] = []
        node = self
        while node.parent is not None:
            line.append(node)
            node = node.parent
        line.reverse()
        return line

    @property
    def path(self) -> tuple[int, ...]:
        """Tokens from the root's child down to this node."""
        return tuple(node.token for node in self.line)

    @property
    def path_log_prob(self) -> float:
        """Log probability that the whole path is accepted, as far as the draft can tell."""
        return sum(node.log_prob for node in self.line)

    @property
    def rank(self) -> int:
        """Place among the continuations of the parent; beyond them all when it is none."""
        assert self.parent is not None
        rank = self.parent.rank_of(self.token)
        return len(self.parent.continuations) if rank is None else rank

    def rank_of(self, token: int) -> int | None:
        """Returns a token's place among the continuations; None when it is none."""
        return rank_of(self.continuations, token)

    def child(self, token: int) -> TailNode:
        """Returns the node of a token below this one, a new one if need be."""
        node = self.children.get(token)
        if node is None:
            known = (value for each, value in self.continuations if each == token)
            node = TailNode(token, self, next(known, 0.0))
            self.children[token] = node
        return node

    def learn(self, continuations: Sequence[Continuation]) -> None:
        """Takes the best tokens after this node, now that it is computed."""
        # Rounding can leave a log probability just above 0; a path must not beat its prefix.
        self.continuations = tuple((token, min(value, 0.0)) for token, value in continuations)
        for token, value in self.continuations:
            if token in self.children:
                self.children[token].log_prob = value

    def walk(self) -> Iterator[TailNode]:
        """Yields this node and everything below it, parents first."""
        stack = [self]
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())


class Tail:
    """The rows behind the committed tokens of one sequence.

    Attributes:
        base: KV index of row 0.
        root: the last committed token.
        num_rows: rows computed, those that belong to no node any more included.
    """

    def __init__(self, base: int, last_token: int) -> None:
        self.base = base
        self.root = TailNode(last_token, None, 0.0)
        self.num_rows = 0

    def add(self, parent: TailNode, token: int) -> TailNode:
        """Appends a row; returns its node."""
        node = parent.child(token)
        node.row = self.num_rows
        self.num_rows += 1
        return node

    def lay_out(self, nodes: Sequence[TailNode], pages: Sequence[int]) -> SequenceRows:
        """Gives each node the next row and returns the rows, all with logits.

        Args:
            nodes: not computed, all above them are, or come before them.
            pages: of the sequence; they reach to the last row.
        """
        first_row = self.num_rows
        for node in nodes:
            assert node.row is None, "a row is computed once"
            node.row = self.num_rows
            self.num_rows += 1
        return SequenceRows(
            token_ids=[node.token for node in nodes],
            positions=[self.base + node.depth - 1 for node in nodes],
            kv_start=self.base + first_row,
            pages=pages,
            prefix_length=self.base,
            tail_mask=self._mask(nodes),
            logit_rows=range(len(nodes)),
        )

    def match(self, token_ids: Sequence[int]) -> list[TailNode]:
        """Returns the computed nodes of the longest path whose tokens begin `token_ids`."""
        path: list[TailNode] = []
        node = self.root
        for token in token_ids:
            below = node.children.get(token)
            if below is None or below.row is None:
                break
            path.append(below)
            node = below
        return path

    def reroot(self, node: TailNode) -> list[tuple[int, int]]:
        """Makes a computed node the last committed token.

        Returns:
            For each row that stays, its number before and after, from the old base; the path's
            rows come first, then those of what hangs below the node.
        """
        path = node.line
        kept = [each for each in node.walk() if each.row is not None and each is not node]
        kept.sort(key=_row)
        moves = [(_row(each), place) for place, each in enumerate([*path, *kept])]
        shift = node.depth
        for each in node.walk():
            each.depth -= shift
        for row, each in enumerate(kept):
            each.row = row
        node.parent, node.row, node.log_prob = None, None, 0.0
        self.base += len(path)
        self.root, self.num_rows = node, len(kept)
        return moves

    def forget_rows(self) -> None:
        """Keeps the tree, but takes every row as not computed."""
        for node in self.root.walk():
            node.row = None
        self.num_rows = 0

    def _mask(self, nodes: Sequence[TailNode]) -> list[list[bool]] | None:
        """Each node sees its ancestors and itself; None when that is what causality says."""
        mask: list[list[bool]] = []
        for node in nodes:
            seen = [False] * self.num_rows
            for above in node.line:
                seen[_row(above)] = True
            mask.append(seen)
        is_causal = all(all(seen[: _row(node) + 1]) for node, seen in zip(nodes, mask, strict=True))
        return None if is_causal else mask


def _row(node: TailNode) -> int:
    assert node.row is not None, "the node is not computed"
    return node.row


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


# The tree rows of one sequence behind its committed tokens, level by level.


class TreeTail:
    """Lays out each beam of a growing tree as the next rows of the sequence's KV tail.

    Attributes:
        tail: the rows laid out so far.
        paths: tree tokens on the path of each node of the last beam, its own included.
    """

    def __init__(self, kv: SequenceKv, last_token: int) -> None:
        self.tail = Tail(kv.num_computed, last_token)
        self.paths: list[tuple[int, ...]] = [()]
        self._pages = kv.lease.pages
        self._beams: list[list[TailNode]] = [[self.tail.root]]

    def extend(self, beam: BeamRows) -> SequenceRows:
        """Lays out the rows of the next beam, all with logits."""
        token_ids, parents = beam.token_ids, beam.parents
        first_row, depth = self.tail.num_rows, len(self.paths[0])
        above = [self._beams[-1][place] for place in parents]
        nodes = [self.tail.add(node, token) for node, token in zip(above, token_ids, strict=True)]
        self._beams.append(nodes)
        self.paths = [
            (*self.paths[place], token) for place, token in zip(parents, token_ids, strict=True)
        ]
        return SequenceRows(
            token_ids=token_ids,
            positions=[self.tail.base + depth] * len(nodes),
            kv_start=self.tail.base + first_row,
            pages=self._pages,
            prefix_length=self.tail.base,
            # A chain is causal.
            tail_mask=None if len(nodes) == 1 else beam.visible,
            logit_rows=range(len(nodes)),
        )

    def keep_states(self, states: Sequence[Sequence[Tensor]]) -> None:
        """Takes the states of a head's rows: one entry a level, in it one a node."""
        for nodes, level in zip(self._beams, states, strict=True):
            for node, state in zip(nodes, level, strict=True):
                node.state = state

    def learn(self, levels: Sequence[Sequence[Sequence[tuple[int, float]]]]) -> None:
        """Takes the best tokens after each row: one entry a level, in it one a node."""
        for nodes, level in zip(self._beams, levels, strict=True):
            for node, continuations in zip(nodes, level, strict=True):
                node.learn(continuations)


def beam_rows(beam: Beam, tails: Sequence[TreeTail]) -> list[SequenceRows]:
    """Lays out the beam of each tree. Waits for the device once a level: the host lays out the
    rows."""
    return [tail.extend(own) for tail, own in zip(tails, beam.on_host(), strict=True)]


def learn_levels(tails: Sequence[TreeTail], levels: Sequence[Children]) -> None:
    """Hands the best tokens after each row to the tails. Waits for the device."""
    for tail, *own in zip(tails, *(level.on_host() for level in levels), strict=True):
        tail.learn(own)
