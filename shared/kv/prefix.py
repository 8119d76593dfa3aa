"""A radix tree of computed prompt prefixes at page granularity. No torch.

Every node below the root owns a run of whole pages with their tokens. Nodes in use by a sequence
are locked together with their ancestors; the rest is evicted leaf by leaf, least recently used
first. The idea is SGLang's RadixAttention (arXiv 2312.07104); whole pages keep splits simple: two
prefixes that part inside a page share nothing of that page.

A *salt* stands before the first token: prefixes of different salts have nothing in common.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

PageTokens = tuple[int | str, ...]


@dataclass(slots=True, eq=False)
class PrefixNode:
    """A run of pages. `chunks[i]` are the tokens whose KV is in `pages[i]`."""

    parent: PrefixNode | None
    chunks: list[PageTokens]
    pages: list[int]
    children: dict[PageTokens, PrefixNode] = field(default_factory=dict)
    num_locks: int = 0
    last_used: int = 0


class PrefixCache:
    """Maps token prefixes to the pages that hold their KV."""

    def __init__(self, page_size: int) -> None:
        self._page_size = page_size
        self._root = PrefixNode(None, [], [])
        self._clock = 0
        self.num_pages = 0

    def match(self, token_ids: Sequence[int], salt: str = "") -> tuple[PrefixNode, list[int]]:
        """Returns the node where the longest cached whole-page prefix ends, and its pages.

        A match that ends inside a node splits it, so that the returned node covers the match
        exactly and can be locked.
        """
        self._clock += 1
        node, pages = self._root, list[int]()
        chunks = self._chunks(token_ids, salt)
        index = 0
        while index < len(chunks):
            child = node.children.get(chunks[index])
            if child is None:
                break
            num_common = _num_common(child.chunks, chunks, index)
            if num_common < len(child.chunks):
                child = self._split(child, num_common)
            child.last_used = self._clock
            pages.extend(child.pages)
            node = child
            index += num_common
        return node, pages

    def insert(self, token_ids: Sequence[int], pages: Sequence[int], salt: str = "") -> list[int]:
        """Takes over `pages`, which hold the KV of the whole pages of `token_ids`.

        Returns:
            Pages that were not taken because an equal prefix is cached already; the caller still
            owns them, unless they are the cached pages themselves.
        """
        chunks = self._chunks(token_ids, salt)
        assert len(pages) == len(chunks)
        node, cached = self.match(token_ids, salt)
        num_cached = len(cached)
        duplicates = [page for page, kept in zip(pages, cached, strict=False) if page != kept]
        if num_cached < len(chunks):
            leaf = PrefixNode(node, chunks[num_cached:], list(pages[num_cached:]))
            leaf.last_used = self._clock
            node.children[leaf.chunks[0]] = leaf
            self.num_pages += len(leaf.pages)
        return duplicates

    def lock(self, node: PrefixNode) -> None:
        """Keeps `node` and its ancestors from eviction."""
        for ancestor in _lineage(node):
            ancestor.num_locks += 1

    def unlock(self, node: PrefixNode) -> None:
        """Takes one lock back."""
        for ancestor in _lineage(node):
            assert ancestor.num_locks > 0
            ancestor.num_locks -= 1

    def evict(self, num_pages: int) -> list[int]:
        """Drops unlocked leaves, least recently used first, until `num_pages` are out or none is
        left, and returns the pages. A leaf gives its last pages first and is cut, not dropped
        whole, when that is enough."""
        leaves = [
            (node.last_used, id(node), node)
            for node in self._nodes()
            if not node.children and node.num_locks == 0
        ]
        heapq.heapify(leaves)
        evicted: list[int] = []
        while leaves and len(evicted) < num_pages:
            _, _, leaf = heapq.heappop(leaves)
            count = min(len(leaf.pages), num_pages - len(evicted))
            evicted.extend(leaf.pages[-count:])
            del leaf.pages[-count:]
            parent = leaf.parent
            assert parent is not None
            if leaf.pages:
                del leaf.chunks[-count:]
                continue
            del parent.children[leaf.chunks[0]]
            if parent is not self._root and not parent.children and parent.num_locks == 0:
                heapq.heappush(leaves, (parent.last_used, id(parent), parent))
        self.num_pages -= len(evicted)
        return evicted

    def locked_pages(self) -> Iterator[int]:
        """Yields the pages of locked nodes."""
        for node in self._nodes():
            if node.num_locks:
                yield from node.pages

    def all_pages(self) -> Iterator[int]:
        """Yields every cached page."""
        for node in self._nodes():
            yield from node.pages

    def _chunks(self, token_ids: Sequence[int], salt: str) -> list[PageTokens]:
        size = self._page_size
        starts = range(0, len(token_ids) - size + 1, size)
        chunks: list[PageTokens] = [tuple(token_ids[start : start + size]) for start in starts]
        if salt and chunks:
            chunks[0] = (salt, *chunks[0])
        return chunks

    def _split(self, node: PrefixNode, num_pages: int) -> PrefixNode:
        parent = node.parent
        assert parent is not None
        upper = PrefixNode(
            parent,
            node.chunks[:num_pages],
            node.pages[:num_pages],
            num_locks=node.num_locks,
            last_used=node.last_used,
        )
        node.parent = upper
        node.chunks = node.chunks[num_pages:]
        node.pages = node.pages[num_pages:]
        upper.children[node.chunks[0]] = node
        parent.children[upper.chunks[0]] = upper
        return upper

    def _nodes(self) -> Iterator[PrefixNode]:
        stack = list(self._root.children.values())
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())


def _num_common(node_chunks: Sequence[PageTokens], chunks: Sequence[PageTokens], start: int) -> int:
    count = 0
    for mine, theirs in zip(node_chunks, chunks[start:], strict=False):
        if mine != theirs:
            break
        count += 1
    return count


def _lineage(node: PrefixNode) -> Iterator[PrefixNode]:
    current: PrefixNode | None = node
    while current is not None:
        yield current
        current = current.parent
