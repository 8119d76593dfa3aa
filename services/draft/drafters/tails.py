"""The drafted subtree behind the committed tokens of one sequence: a tree of rows.

*Row r* of a tail is the KV at index `base + r`. Rows lie in the order they were computed, so a
parent's is below its child's. When a verdict commits a path, the tree is rooted anew at the
path's end: what hangs below it stays, moved to the front of the tail, and the rest is forgotten.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import Tensor

from services.draft.likely_verdicts import Continuation, rank_of
from shared.kv.batch import SequenceRows
from shared.speculation.tree import Beam, BeamRows, Children


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


class TreeTail:
    """Lays out each beam of a growing tree as the next rows of the sequence's KV tail.

    Attributes:
        tail: the rows laid out so far.
        paths: tree tokens on the path of each node of the last beam, its own included.
    """

    def __init__(self, base: int, pages: Sequence[int], last_token: int) -> None:
        self.tail = Tail(base, last_token)
        self.paths: list[tuple[int, ...]] = [()]
        self._pages = pages
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
