"""Ownership of KV pages: sequences hold leases, the cache holds finished prefixes, nobody else.

Every live page is in exactly one state: *free*, *cached* (in the prefix cache, whether or not a
sequence is reading it) or *held* (by one lease or one branch alone). `free + cached + held = total`
always.

A radix tree of computed prompt prefixes at page granularity. No torch.

Every node below the root owns a run of whole pages with their tokens. Nodes in use by a sequence
are locked together with their ancestors; the rest is evicted leaf by leaf, least recently used
first. The idea is SGLang's RadixAttention (arXiv 2312.07104); whole pages keep splits simple: two
prefixes that part inside a page share nothing of that page.

A *salt* stands before the first token: prefixes of different salts have nothing in common.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

PADDING_PAGE = 0
"""Never allocated: padded rows and padded page-table columns point at it."""

PageTokens = tuple[int | str, ...]
__all__ = ["KvBranch", "KvLease", "KvLeases", "OutOfPages"]


class OutOfPages(Exception):
    """Fewer pages are free than were asked for; nothing was allocated."""

    def __init__(self, num_wanted: int, num_free: int) -> None:
        super().__init__(f"{num_wanted} pages wanted; {num_free} are free")
        self.num_wanted = num_wanted
        self.num_free = num_free


class PagePool:
    """Owns the pages `[1, num_pages)`, or some of them; each is either free or held by exactly one
    holder."""

    def __init__(self, num_pages: int) -> None:
        assert num_pages >= 2, "one padding page and at least one live page"
        self._free = list(range(num_pages - 1, PADDING_PAGE, -1))
        self._is_free = bytearray([0, *[1] * (num_pages - 1)])
        self.num_pages = num_pages - 1

    @classmethod
    def of(cls, pages: Iterable[int]) -> PagePool:
        """Returns a pool of the given pages."""
        owned = list(pages)
        pool = cls(max(owned, default=PADDING_PAGE + 1) + 1)
        pool._free = owned[::-1]
        pool._is_free = bytearray(len(pool._is_free))
        for page in owned:
            pool._is_free[page] = 1
        pool.num_pages = len(owned)
        return pool

    @property
    def num_free(self) -> int:
        return len(self._free)

    def allocate(self, count: int) -> list[int]:
        """Takes `count` pages.

        Raises:
            OutOfPages: fewer are free; nothing was taken.
        """
        if count > len(self._free):
            raise OutOfPages(count, len(self._free))
        pages = [self._free.pop() for _ in range(count)]
        for page in pages:
            self._is_free[page] = 0
        return pages

    def release(self, pages: Iterable[int]) -> None:
        """Gives pages back; each must be held by the caller alone."""
        for page in pages:
            assert not self._is_free[page], f"page {page} released twice"
            self._is_free[page] = 1
            self._free.append(page)


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


@dataclass(slots=True, eq=False)
class KvLease:
    """The pages of one sequence, in logical order.

    Attributes:
        pages: `[0, num_shared_pages)` belong to the prefix cache and are read only;
            `[num_shared_pages, …)` are this lease's own.
        num_cached_tokens: tokens whose KV was found in the cache when the lease was opened.
        cache: what `prefix` is in; a retired one takes no pages any more.
        salt: prefixes are shared with leases of the same salt only.
        version: grows with every change of `pages`.
    """

    pages: list[int]
    num_cached_tokens: int
    num_shared_pages: int
    prefix: PrefixNode = field(repr=False)
    cache: PrefixCache = field(repr=False)
    salt: str = ""
    version: int = 0

    def slots(self, start: int, end: int, page_size: int) -> list[int]:
        """Returns the KV slots of the logical indices `[start, end)`."""
        return [
            self.pages[index // page_size] * page_size + index % page_size
            for index in range(start, end)
        ]


@dataclass(slots=True, eq=False)
class KvBranch:
    """Pages that a lease may end in instead of its own.

    Attributes:
        first_page: the place in the lease's `pages` that `pages` begin at; those before are shared.
    """

    first_page: int
    pages: list[int]


class KvLeases:
    """Hands out leases over one page pool and keeps finished prefixes for reuse.

    Attributes:
        num_returns: how often pages came free, or prefixes to share: until the next time, what did
            not fit does not fit.
    """

    def __init__(self, num_pages: int, page_size: int, *, prefix_cache: bool = True) -> None:
        self.page_size = page_size
        self._pool = PagePool(num_pages)
        self._cache = PrefixCache(page_size)
        # Of weights that have been replaced, as long as leases read pages of theirs.
        self._retired: list[PrefixCache] = []
        self._caches_prefixes = prefix_cache
        self._leases: dict[int, KvLease] = {}
        self._branches: dict[int, KvBranch] = {}
        self.num_returns = 0

    @property
    def num_pages(self) -> int:
        """Live pages, the padding page left out."""
        return self._pool.num_pages

    @property
    def num_free_pages(self) -> int:
        return self._pool.num_free

    @property
    def num_cached_pages(self) -> int:
        return sum(cache.num_pages for cache in self._caches)

    @property
    def _caches(self) -> tuple[PrefixCache, ...]:
        return (self._cache, *self._retired)

    @property
    def num_held_pages(self) -> int:
        return self.num_pages - self.num_free_pages - self.num_cached_pages

    def open(self, token_ids: Sequence[int], salt: str = "") -> KvLease:
        """Opens a lease on the longest cached prefix of `token_ids`, of those with this salt.

        At least one token is left to compute, because its logits are wanted.
        """
        node, pages = self._cache.match(token_ids[:-1], salt)
        self._cache.lock(node)
        num_shared = len(pages)
        lease = KvLease(pages, num_shared * self.page_size, num_shared, node, self._cache, salt)
        self._leases[id(lease)] = lease
        return lease

    def grow(self, lease: KvLease, num_tokens: int) -> None:
        """Makes the lease's pages cover `num_tokens`, evicting unused prefixes if need be.

        Raises:
            OutOfPages: not enough pages even so; the lease is as it was.
        """
        num_missing = -(-num_tokens // self.page_size) - len(lease.pages)
        if num_missing <= 0:
            return
        lease.pages.extend(self._allocate(num_missing))
        lease.version += 1

    def try_grow(self, lease: KvLease, num_tokens: int) -> bool:
        """Does what `grow` does; False, with the lease as it was, where it raises."""
        try:
            self.grow(lease, num_tokens)
        except OutOfPages:
            return False
        return True

    def try_branch(self, lease: KvLease, num_shared: int, num_tokens: int) -> KvBranch | None:
        """Returns other pages for the tokens `[num_shared, num_tokens)` of a lease; None where none
        are left. Those of a page that is shared in part have to be copied."""
        first_page = num_shared // self.page_size
        assert first_page >= lease.num_shared_pages, "a branch would end a cached prefix"
        count = -(-num_tokens // self.page_size) - first_page
        try:
            branch = KvBranch(first_page, self._allocate(count))
        except OutOfPages:
            return None
        self._branches[id(branch)] = branch
        return branch

    def drop_branch(self, branch: KvBranch) -> None:
        """Frees the pages of a branch."""
        del self._branches[id(branch)]
        self.num_returns += 1
        self._pool.release(branch.pages)
        branch.pages = []

    def adopt(self, lease: KvLease, branch: KvBranch) -> None:
        """Ends the lease in the pages of a branch of it, and frees its own ones there."""
        assert branch.first_page >= lease.num_shared_pages, "the lease shares more than it did"
        lease.pages[branch.first_page :], branch.pages = (
            branch.pages,
            lease.pages[branch.first_page :],
        )
        lease.version += 1
        self.drop_branch(branch)

    def close(self, lease: KvLease, token_ids: Sequence[int]) -> None:
        """Ends the lease. `token_ids` are those whose KV is computed: their whole pages go to the
        prefix cache, every other own page is freed."""
        del self._leases[id(lease)]
        self.num_returns += 1
        num_computed_pages = len(token_ids) // self.page_size if self._may_share(lease) else 0
        num_kept = max(num_computed_pages, lease.num_shared_pages)
        self._pool.release(lease.pages[num_kept:])
        if num_computed_pages > lease.num_shared_pages:
            tokens = token_ids[: num_kept * self.page_size]
            self._pool.release(self._cache.insert(tokens, lease.pages[:num_kept], lease.salt))
        lease.cache.unlock(lease.prefix)
        if lease.cache is not self._cache:
            self._drop_retired()
        lease.pages = []
        lease.version += 1

    def publish(self, lease: KvLease, token_ids: Sequence[int]) -> None:
        """Shares the whole pages of computed `token_ids` while the lease goes on, so that other
        sequences with the same prompt need not wait for this one to end."""
        num_pages = len(token_ids) // self.page_size
        if not self._may_share(lease) or num_pages <= lease.num_shared_pages:
            return
        self.num_returns += 1
        tokens = token_ids[: num_pages * self.page_size]
        self._pool.release(self._cache.insert(tokens, lease.pages[:num_pages], lease.salt))
        node, pages = self._cache.match(tokens, lease.salt)
        self._cache.lock(node)
        self._cache.unlock(lease.prefix)
        lease.pages[:num_pages] = pages
        lease.version += 1
        lease.prefix, lease.num_shared_pages = node, num_pages

    def flush(self) -> int:
        """Frees every cached page that no sequence reads; returns how many."""
        pages = self._cache.evict(self._cache.num_pages)
        self._pool.release(pages)
        return len(pages)

    def retire(self) -> int:
        """Ends the reuse of everything computed so far: the weights are others, or a draft reads
        what nobody kept of it. Leases go on with the pages they have, and share none of them any
        more; returns how many pages came free."""
        self._retired.append(self._cache)
        self._cache = PrefixCache(self.page_size)
        self.num_returns += 1
        return self._drop_retired()

    def _drop_retired(self) -> int:
        """Frees the pages of retired caches that no lease reads; returns how many."""
        num_freed = 0
        for cache in self._retired:
            pages = cache.evict(cache.num_pages)
            self._pool.release(pages)
            num_freed += len(pages)
        self._retired = [cache for cache in self._retired if cache.num_pages]
        return num_freed

    def _may_share(self, lease: KvLease) -> bool:
        return self._caches_prefixes and lease.cache is self._cache

    def _allocate(self, count: int) -> list[int]:
        if count > self._pool.num_free:
            self._pool.release(self._cache.evict(count - self._pool.num_free))
        return self._pool.allocate(count)

    def check(self) -> None:
        """Asserts that every page has exactly one owner."""
        cached = [page for cache in self._caches for page in cache.all_pages()]
        held = [
            page
            for lease in self._leases.values()
            for page in lease.pages[lease.num_shared_pages :]
        ]
        held += [page for branch in self._branches.values() for page in branch.pages]
        owned = cached + held
        assert len(set(owned)) == len(owned), "a page has two owners"
        assert len(cached) == self.num_cached_pages
        assert len(owned) + self._pool.num_free == self.num_pages, (
            f"free {self._pool.num_free} + cached {len(cached)} + held {len(held)}"
            f" is not total {self.num_pages}"
        )
        locked = {page for cache in self._caches for page in cache.locked_pages()}
        shared = {
            page
            for lease in self._leases.values()
            for page in lease.pages[: lease.num_shared_pages]
        }
        assert locked == shared, "locks and leases disagree"
