"""Grows a candidate tree out of the n-gram trie.

Every suffix of the committed tokens that was seen before with a continuation is an *anchor*. The
longest anchor predicts best, so it fills the tree first; shorter ones add what room is left, and
paths they share with longer ones become one.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from shared.ngram.trie import NgramTrie
from shared.tokens import TokenTree, TreeShape

MAX_SCANNED_CHILDREN = 64
"""Continuations looked at, the most recent first: frequent words have thousands."""


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

    A node has at most `breadth` children: `shape.topk` after one token of context, fewer the
    longer the context, `min_breadth` at the trie's depth.

    Args:
        anchors: trie node and length of its n-gram, the longest first.
    """
    growth = _Growth(shape)
    for anchor, length in anchors:
        queue: deque[tuple[int, int | None, int]] = deque([(anchor, None, 0)])
        while queue and not growth.is_full:
            node, parent, depth = queue.popleft()
            if depth == shape.num_steps:
                break
            breadth = _breadth(length + depth, trie.max_depth, min_breadth, shape.topk)
            for child, log_prob in itertools.islice(_continuations(trie, node), breadth):
                grown = growth.add(parent, trie.token(child), log_prob)
                if grown is not None:
                    queue.append((child, grown, depth + 1))
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


def _breadth(context_length: int, max_depth: int, low: int, high: int) -> int:
    """Falls linearly from `high` at one token of context to `low` at `max_depth - 1`."""
    low = min(low, high)
    share = (context_length - 1) / max(max_depth - 2, 1)
    return max(low, round(high - (high - low) * share))


def _continuations(trie: NgramTrie, node: int) -> Sequence[tuple[int, float]]:
    """Recent children of a node with their log relative frequency, the most recent first."""
    children = list(itertools.islice(trie.children(node), MAX_SCANNED_CHILDREN))
    total = sum(trie.count(child) for child in children)
    return [(child, math.log(trie.count(child) / total)) for child in children]


def _most_frequent(trie: NgramTrie, node: int, limit: int) -> Sequence[tuple[int, float]]:
    """The `limit` most frequent of the recent children; among equals the more recent first."""
    return sorted(_continuations(trie, node), key=lambda pair: -pair[1])[:limit]
