"""A trie of every n-gram seen, in flat arrays, with a bound on its nodes.

A node stands for the n-gram on the path from the root. Children of a node form a doubly linked
list, the most recently seen first; all nodes form a second list in the same order for eviction.
About 36 bytes of arrays and one dictionary entry (about 110 bytes) a node.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence

ROOT = 0
_NONE = 0
"""Null link. The root is nobody's child, sibling or neighbour, so its index is free for this."""


class NgramTrie:
    """Counts n-grams of length 1 to `max_depth`; evicts the least recently seen ones.

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
