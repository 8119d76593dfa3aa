"""N-gram index over many texts: finds what followed the same tokens before. No torch.

One trie holds the n-grams of every text that was taken in. A *cursor* is where one text ends in
it; one that is led on over tokens that are only supposed counts nothing. Texts of one *salt* share
a trie of their own below the root.

Trees grow out of it. Every suffix of the committed tokens that was seen before with a continuation
is an *anchor*. The longest anchor predicts best, so it fills the tree first; shorter ones add what
room is left, and paths they share with longer ones become one."""

from __future__ import annotations

import enum
import functools
import hashlib
import heapq
import itertools
import math
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from shared.tokens import EMPTY_TREE, TokenTree, TreeShape

ROOT = 0
_NONE = 0
"""Null link. The root is nobody's child, sibling or neighbour, so its index is free for this."""

MAX_SCANNED_CHILDREN = 64
"""Continuations looked at, the most recent first: frequent words have thousands."""


class NgramTrie:
    """Counts n-grams of length 1 to `max_depth`; evicts the least recently seen ones.

    A node stands for the n-gram on the path from the root. Children of a node form a doubly linked
    list, the most recently seen first; all nodes form a second list in the same order for eviction.
    About 36 bytes of arrays and one dictionary entry (about 110 bytes) a node.

    A node that is evicted may come back for another n-gram: cursors that were taken before
    `num_evictions` last changed must be taken again.
    """

    def __init__(self, *, max_depth: int, capacity: int) -> None:
        assert max_depth >= 2, "a prediction needs at least one token of context"
        assert capacity >= max_depth, "one n-gram of the greatest length must fit"
        self.max_depth = max_depth
        self.capacity = capacity
        self.num_evictions = 0
        self._index: dict[int, int] = {}
        self._free: list[int] = []
        self._token = array("i", [0])
        self._count = array("q", [0])
        self._parent = array("i", [_NONE])
        self._first_child = array("i", [_NONE])
        self._next_sibling = array("i", [_NONE])
        self._previous_sibling = array("i", [_NONE])
        # The root closes the ring: after it comes the newest node, before it the oldest.
        self._older = array("i", [ROOT])
        self._newer = array("i", [ROOT])

    def __len__(self) -> int:
        """Nodes, the root left out."""
        return len(self._index)

    def token(self, node: int) -> int:
        return self._token[node]

    def count(self, node: int) -> int:
        """Times that the n-gram of `node` was seen since it was last inserted anew."""
        return self._count[node]

    def parent(self, node: int) -> int:
        return self._parent[node]

    def child(self, node: int, token: int) -> int | None:
        """Returns the node of the n-gram of `node` followed by `token`, if it was seen."""
        return self._index.get((node << 32) + token)

    def find(self, token_ids: Sequence[int], root: int = ROOT) -> int | None:
        """Returns the node of an n-gram below `root`, that for none at all, if it was seen."""
        node: int | None = root
        for token in token_ids:
            if node is None:
                return None
            node = self.child(node, token)
        return node

    def children(self, node: int) -> Iterator[int]:
        """Yields the continuations of a node, the most recently seen first."""
        child = self._first_child[node]
        while child != _NONE:
            yield child
            child = self._next_sibling[child]

    def only_child(self, node: int) -> int | None:
        """Returns the only continuation of a node; None where there are none, or several."""
        child = self._first_child[node]
        return child if child != _NONE and self._next_sibling[child] == _NONE else None

    def see(self, node: int, token: int) -> int:
        """Counts `token` after the n-gram of `node`; returns the node of the longer n-gram.

        At capacity the least recently seen leaf makes way, never `node` itself.
        """
        child = self._index.get((node << 32) + token)
        if child is None:
            self._touch(node)
            child = self._insert(node, token)
        else:
            if self._first_child[node] != child:
                self._unlink_sibling(child)
                self._link_sibling(child)
            self._touch(child)
        self._count[child] += 1
        return child

    def _insert(self, parent: int, token: int) -> int:
        if len(self._index) >= self.capacity:
            self._evict_oldest_leaf(spared=parent)
        node = self._free.pop() if self._free else self._append()
        self._token[node], self._count[node] = token, 0
        self._parent[node], self._first_child[node] = parent, _NONE
        self._index[(parent << 32) + token] = node
        self._link_sibling(node)
        self._link_age(node)
        return node

    def _append(self) -> int:
        for column in (
            self._token,
            self._count,
            self._parent,
            self._first_child,
            self._next_sibling,
            self._previous_sibling,
            self._older,
            self._newer,
        ):
            column.append(0)
        return len(self._token) - 1

    def _link_sibling(self, node: int) -> None:
        """Makes the node its parent's first child."""
        parent = self._parent[node]
        first = self._first_child[parent]
        self._previous_sibling[node], self._next_sibling[node] = _NONE, first
        if first != _NONE:
            self._previous_sibling[first] = node
        self._first_child[parent] = node

    def _link_age(self, node: int) -> None:
        """Makes the node the newest of all."""
        newest = self._older[ROOT]
        self._newer[node], self._older[node] = ROOT, newest
        self._newer[newest] = node
        self._older[ROOT] = node

    def _unlink_age(self, node: int) -> None:
        newer, older = self._newer[node], self._older[node]
        self._older[newer], self._newer[older] = older, newer

    def _touch(self, node: int) -> None:
        if node != ROOT:
            self._unlink_age(node)
            self._link_age(node)

    def _unlink_sibling(self, node: int) -> None:
        before, after = self._previous_sibling[node], self._next_sibling[node]
        if before == _NONE:
            self._first_child[self._parent[node]] = after
        else:
            self._next_sibling[before] = after
        if after != _NONE:
            self._previous_sibling[after] = before

    def _evict_oldest_leaf(self, *, spared: int) -> None:
        """A node with children is as recent as the newest of them: it is moved up instead, so
        every node is moved at most once between two evictions that meet it as the oldest."""
        node = self._newer[ROOT]
        while node == spared or self._first_child[node] != _NONE:
            self._touch(node)
            node = self._newer[ROOT]
        self._unlink_sibling(node)
        self._unlink_age(node)
        del self._index[(self._parent[node] << 32) + self._token[node]]
        self._free.append(node)
        self.num_evictions += 1

    def check(self) -> None:
        """Asserts that index, sibling lists and age list hold the same nodes."""
        listed = set()
        pending = [ROOT]
        while pending:
            parent = pending.pop()
            for node in self.children(parent):
                assert self._parent[node] == parent
                assert self._index[(parent << 32) + self._token[node]] == node
                listed.add(node)
                pending.append(node)
        aged = set()
        node = self._newer[ROOT]
        while node != ROOT:
            aged.add(node)
            node = self._newer[node]
        assert listed == aged == set(self._index.values())
        assert len(listed) + len(self._free) + 1 == len(self._token)
        assert len(listed) <= self.capacity


@dataclass(slots=True)
class _Growth:
    """A tree being merged from several anchors."""

    shape: TreeShape
    token_ids: list[int] = field(default_factory=list)
    parents: list[int | None] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    children: dict[int | None, dict[int, int]] = field(default_factory=dict)

    @property
    def is_full(self) -> bool:
        return len(self.token_ids) >= self.shape.max_node_count

    def add(self, parent: int | None, token: int, log_prob: float) -> int | None:
        """Returns the node of `token` below `parent`; None when there is no room for it."""
        siblings = self.children.setdefault(parent, {})
        if token in siblings:
            return siblings[token]
        if self.is_full or len(siblings) >= self.shape.topk:
            return None
        siblings[token] = node = len(self.token_ids)
        self.token_ids.append(token)
        self.parents.append(parent)
        self.log_probs.append(log_prob)
        return node

    def finish(self) -> TokenTree:
        return TokenTree(tuple(self.token_ids), tuple(self.parents), tuple(self.log_probs))


def grow_by_recency(
    trie: NgramTrie, anchors: Iterable[tuple[int, int]], shape: TreeShape, *, min_breadth: int
) -> TokenTree:
    """Breadth first, the most recent continuations of a node first.

    A node has at most `shape.topk` children after one token of context, fewer the longer the
    context, `min_breadth` at the trie's depth.

    Args:
        anchors: trie node and length of its n-gram, the longest first.
    """
    growth, most = _Growth(shape), shape.max_node_count
    breadths = _breadths(trie.max_depth, min(min_breadth, shape.topk), shape.topk)
    for anchor, length in anchors:
        queue: list[tuple[int, int | None, int]] = [(anchor, None, 0)]
        for node, parent, depth in queue:  # which grows meanwhile
            if depth == shape.num_steps or len(growth.token_ids) >= most:
                break
            only_child = trie.only_child(node)
            if only_child is None:
                found = _continuations(trie, node)[: breadths[length + depth]]
            else:
                found = ((only_child, 0.0),)
            for child, log_prob in found:
                grown = growth.add(parent, trie.token(child), log_prob)
                if grown is not None:
                    queue.append((child, grown, depth + 1))
        if len(growth.token_ids) >= most:
            break
    return growth.finish()


def grow_by_frequency(
    trie: NgramTrie, anchors: Iterable[tuple[int, int]], shape: TreeShape
) -> TokenTree:
    """Best first by the product of relative frequencies along the path.

    Args:
        anchors: trie node and length of its n-gram, the longest first.
    """
    growth = _Growth(shape)
    for anchor, _ in anchors:
        # Heap entries: cost (negated log probability of the path), order of arrival for ties,
        # trie node, tree parent, log probability given the parent, depth.
        heap: list[tuple[float, int, int, int | None, float, int]] = []
        order = itertools.count()
        for child, log_prob in _most_frequent(trie, anchor, shape.topk):
            heapq.heappush(heap, (-log_prob, next(order), child, None, log_prob, 1))
        while heap and not growth.is_full:
            cost, _, node, parent, log_prob, depth = heapq.heappop(heap)
            grown = growth.add(parent, trie.token(node), log_prob)
            if grown is None or depth == shape.num_steps:
                continue
            for child, child_log_prob in _most_frequent(trie, node, shape.topk):
                entry = (cost - child_log_prob, next(order), child, grown, child_log_prob)
                heapq.heappush(heap, (*entry, depth + 1))
    return growth.finish()


@functools.cache
def _breadths(max_depth: int, low: int, high: int) -> tuple[int, ...]:
    """Returns the most children of a node by tokens of context, up to `max_depth`: they fall
    linearly from `high` at one token to `low` at `max_depth - 1`."""
    shares = ((length - 1) / max(max_depth - 2, 1) for length in range(max_depth + 1))
    return tuple(max(low, round(high - (high - low) * share)) for share in shares)


def _continuations(trie: NgramTrie, node: int) -> Sequence[tuple[int, float]]:
    """Recent children of a node with their log relative frequency, the most recent first."""
    children = list(itertools.islice(trie.children(node), MAX_SCANNED_CHILDREN))
    total = sum(trie.count(child) for child in children)
    return [(child, math.log(trie.count(child) / total)) for child in children]


def _most_frequent(trie: NgramTrie, node: int, limit: int) -> Sequence[tuple[int, float]]:
    """The `limit` most frequent of the recent children; among equals the more recent first."""
    return sorted(_continuations(trie, node), key=lambda pair: -pair[1])[:limit]


class MatchType(enum.Enum):
    """The order in which a tree is grown from the trie."""

    BFS = "BFS"
    PROB = "PROB"


@dataclass(frozen=True, slots=True)
class NgramOptions:
    """Size and lookup options of the trie.

    Attributes:
        max_trie_depth: longest n-gram, context and continuation together.
        capacity: most trie nodes.
        min_breadth: fewest children of a node in BFS trees, at the longest context; the most are
            the tree shape's `topk`.
        min_match: tokens of context that must have occurred before to draft from.
    """

    match_type: MatchType = MatchType.BFS
    max_trie_depth: int = 18
    capacity: int = 10_000_000
    min_breadth: int = 1
    min_match: int = 1


@dataclass(slots=True)
class Cursor:
    """The position of a text's end in the trie.

    Attributes:
        nodes: element i is the node of the last i + 1 tokens taken in, None if it was evicted.
        num_seen: tokens taken in.
        num_evictions: the trie's count when `nodes` and `root` were valid.
        salt: the text's, as a path of the trie that no tokens have.
        root: where that path ends.
    """

    nodes: list[int | None] = field(default_factory=list)
    num_seen: int = 0
    num_evictions: int = 0
    salt: tuple[int, ...] = ()
    root: int = ROOT


class NgramIndex:
    """N-grams of many texts, and trees grown from them."""

    def __init__(self, options: NgramOptions) -> None:
        self._options = options
        self._trie = NgramTrie(max_depth=options.max_trie_depth, capacity=options.capacity)

    def __len__(self) -> int:
        """N-grams held."""
        return len(self._trie)

    @property
    def num_evictions(self) -> int:
        return self._trie.num_evictions

    def cursor(self, salt: str = "") -> Cursor:
        """Returns the cursor of a text that begins."""
        cursor = Cursor(salt=_salt_path(salt))
        self._find_root(cursor)
        return cursor

    def learn(self, token_ids: Sequence[int]) -> None:
        """Takes a whole text in."""
        self.take_in(self.cursor(), token_ids, len(token_ids))

    def take_in(self, cursor: Cursor, token_ids: Sequence[int], num_tokens: int) -> None:
        """Counts the n-grams that end at each of the next `num_tokens` tokens of a text."""
        for _ in range(num_tokens):
            self._refresh(cursor, token_ids)
            self._see(cursor, token_ids[cursor.num_seen])
        self._refresh(cursor, token_ids)

    def grow(self, cursor: Cursor, token_ids: Sequence[int], shape: TreeShape) -> TokenTree:
        """Returns a tree of continuations of the cursor's last tokens, perhaps empty.

        Args:
            token_ids: the cursor's text.
        """
        self._refresh(cursor, token_ids)
        return self.grow_ahead(cursor, shape)

    def is_current(self, cursor: Cursor) -> bool:
        """Whether no eviction has touched the cursor since its text was last taken in."""
        return cursor.num_evictions == self._trie.num_evictions

    def supposed(self, cursor: Cursor, token: int) -> Cursor:
        """Returns the cursor of the same text with one more token, which is not counted.

        It is good until the trie changes.
        """
        trie = self._trie
        above: Iterable[int | None] = (cursor.root, *cursor.nodes)
        nodes = [None if node is None else trie.child(node, token) for node in above]
        return replace(cursor, nodes=nodes[: trie.max_depth - 1], num_seen=cursor.num_seen + 1)

    def grow_ahead(self, cursor: Cursor, shape: TreeShape) -> TokenTree:
        """`grow` for a cursor that nothing was taken in after."""
        anchors = [(node, index + 1) for index, node in enumerate(cursor.nodes) if node is not None]
        anchors = anchors[self._options.min_match - 1 :]
        if not anchors:
            return EMPTY_TREE
        anchors.reverse()
        if self._options.match_type is MatchType.PROB:
            return grow_by_frequency(self._trie, anchors, shape)
        return grow_by_recency(self._trie, anchors, shape, min_breadth=self._options.min_breadth)

    def check(self) -> None:
        """Asserts the trie's invariants."""
        self._trie.check()

    def _see(self, cursor: Cursor, token: int) -> None:
        trie = self._trie
        extended: list[int | None] = [trie.see(cursor.root, token)]
        for node in cursor.nodes:
            # An eviction may have given the node to another n-gram; the next refresh repairs it.
            is_valid = node is not None and trie.num_evictions == cursor.num_evictions
            extended.append(trie.see(node, token) if node is not None and is_valid else None)
        # N-grams of the full depth have no continuation, so they are no anchors.
        cursor.nodes = extended[: trie.max_depth - 1]
        cursor.num_seen += 1

    def _refresh(self, cursor: Cursor, token_ids: Sequence[int]) -> None:
        """Finds the cursor's nodes again after evictions."""
        if cursor.num_evictions == self._trie.num_evictions:
            return
        self._find_root(cursor)
        end = cursor.num_seen
        cursor.nodes = [
            self._trie.find(token_ids[end - length : end], cursor.root)
            for length in range(1, min(end, self._trie.max_depth - 1) + 1)
        ]

    def _find_root(self, cursor: Cursor) -> None:
        """Makes the path of the salt again, which an eviction may have broken."""
        cursor.root = ROOT
        for part in cursor.salt:
            cursor.root = self._trie.see(cursor.root, part)
        cursor.num_evictions = self._trie.num_evictions


def _salt_path(salt: str) -> tuple[int, ...]:
    """Returns numbers that are no token ids: 93 bits of a digest, negative."""
    if not salt:
        return ()
    digest = hashlib.blake2b(salt.encode(), digest_size=12).digest()
    return tuple(-1 - (int.from_bytes(digest[i : i + 4]) >> 1) for i in (0, 4, 8))
