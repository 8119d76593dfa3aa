"""Ownership of KV pages: sequences hold leases, the prefix cache holds computed prefixes.

Every live page is in exactly one state: *free*, *cached* (in the prefix cache, whether or not a
sequence is reading it) or *held* (by one lease or one branch alone). `free + cached + held = total`
always.

The prefix cache is a radix tree of computed prompt prefixes at page granularity. No torch.

Every node below the root owns a run of whole pages with their tokens. Nodes in use by a sequence
are locked together with their ancestors; the rest is evicted leaf by leaf, least recently used
first. The idea is SGLang's RadixAttention (arXiv 2312.07104). Whole pages keep splits simple: two
prefixes that diverge inside a page do not share that page.

A *salt* stands before the first token: prefixes of different salts have nothing in common.

With data-parallel attention, each process holds a *group* of pages, and all pages of a lease are
in one group.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

_MIN_EVICTED_SHARE = 128
"""An eviction walks all cached prefixes. Under load every new page would trigger one, so each
frees at least 1 / 128 of the group's pages."""
PADDING_PAGE = 0
"""Never allocated: padded rows and padded page-table columns point at it."""

CACHED_PAGE_WEIGHT = 8
"""Available pages that a cached page of the prefix counts for in the choice of a group. Too low,
and prompts are computed twice; too high, and all with one prefix go to one process."""

PageTokens = tuple[int | str, ...]
__all__ = ["KvBranch", "KvLease", "KvLeases", "OutOfPages", "PageGroup"]


class OutOfPages(Exception):
    """Fewer pages are free than were asked for; nothing was allocated."""

    def __init__(self, num_wanted: int, num_free: int) -> None:
        super().__init__(f"{num_wanted} pages wanted; {num_free} are free")
        self.num_wanted = num_wanted
        self.num_free = num_free


class PagePool:
    """The free list of some pages; each page is either free or has exactly one holder.

    Attributes:
        free: the free pages; the last one is taken next.
    """

    def __init__(self, pages: Iterable[int]) -> None:
        self.free = list(pages)[::-1]
        self._is_free = bytearray(max(self.free, default=PADDING_PAGE) + 1)
        for page in self.free:
            self._is_free[page] = 1

    def allocate(self, count: int) -> list[int]:
        """Takes `count` pages.

        Raises:
            OutOfPages: fewer are free; nothing was taken.
        """
        if count > len(self.free):
            raise OutOfPages(count, len(self.free))
        pages = [self.free.pop() for _ in range(count)]
        for page in pages:
            self._is_free[page] = 0
        return pages

    def release(self, pages: Iterable[int]) -> None:
        """Gives pages back; each must be held by the caller alone."""
        for page in pages:
            assert not self._is_free[page], f"page {page} released twice"
            self._is_free[page] = 1
            self.free.append(page)


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
    """Maps token prefixes to the pages that hold their KV.

    Attributes:
        num_locked_pages: cached pages that cannot be evicted.
    """

    def __init__(self) -> None:
        self._root = PrefixNode(None, [], [])
        self._clock = 0
        self.num_pages = 0
        self.num_locked_pages = 0

    def match(self, chunks: Sequence[PageTokens]) -> tuple[PrefixNode, list[int]]:
        """Returns the node where the longest cached prefix of `chunks` ends, and its pages.

        A match that ends inside a node splits it, so that the returned node covers the match
        exactly and can be locked.
        """
        self._clock += 1
        node, pages = self._root, list[int]()
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

    def insert(self, chunks: Sequence[PageTokens], pages: Sequence[int]) -> list[int]:
        """Takes over `pages`, which hold the KV of `chunks`.

        Returns:
            Pages that were not taken because an equal prefix is cached already; the caller still
            owns them, unless they are the cached pages themselves.
        """
        assert len(pages) == len(chunks)
        node, cached = self.match(chunks)
        num_cached = len(cached)
        duplicates = [page for page, kept in zip(pages, cached, strict=False) if page != kept]
        if num_cached < len(chunks):
            leaf = PrefixNode(node, list(chunks[num_cached:]), list(pages[num_cached:]))
            leaf.last_used = self._clock
            node.children[leaf.chunks[0]] = leaf
            self.num_pages += len(leaf.pages)
        return duplicates

    def lock(self, node: PrefixNode) -> None:
        """Keeps `node` and its ancestors from eviction."""
        for ancestor in _lineage(node):
            ancestor.num_locks += 1
            if ancestor.num_locks == 1:
                self.num_locked_pages += len(ancestor.pages)

    def unlock(self, node: PrefixNode) -> None:
        """Removes one lock from `node` and its ancestors."""
        for ancestor in _lineage(node):
            assert ancestor.num_locks > 0
            ancestor.num_locks -= 1
            if ancestor.num_locks == 0:
                self.num_locked_pages -= len(ancestor.pages)

    def evict(self, num_pages: int) -> list[int]:
        """Evicts unlocked leaves, least recently used first, until `num_pages` are evicted or none
        is left, and returns the pages. A leaf loses its last pages first, and keeps the rest when
        those are enough."""
        leaves = [
            (node.last_used, id(node), node)
            for node in self.nodes()
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

    def nodes(self) -> Iterator[PrefixNode]:
        """Yields every node below the root."""
        stack = list(self._root.children.values())
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())


def _num_common(node_chunks: Sequence[PageTokens], chunks: Sequence[PageTokens], start: int) -> int:
    count = 0
    for node_chunk, chunk in zip(node_chunks, chunks[start:], strict=False):
        if node_chunk != chunk:
            break
        count += 1
    return count


def _lineage(node: PrefixNode) -> Iterator[PrefixNode]:
    current: PrefixNode | None = node
    while current is not None:
        yield current
        current = current.parent


class PageGroup:
    """The pages of one process, and the prefix cache over them.

    Attributes:
        numbers: its page numbers, without its padding page.
        pages: its free list.
        retired: prefix caches of replaced weights, kept while leases still read their pages.
    """

    def __init__(self, numbers: Sequence[int]) -> None:
        self.numbers = numbers
        self.pages = PagePool(numbers)
        self.cache = PrefixCache()
        self.retired: list[PrefixCache] = []

    @property
    def caches(self) -> tuple[PrefixCache, ...]:
        return (self.cache, *self.retired)

    @property
    def num_available(self) -> int:
        """Pages that are free, or cached and unlocked."""
        return len(self.pages.free) + self.cache.num_pages - self.cache.num_locked_pages

    def allocate(self, count: int) -> list[int]:
        """Takes `count` pages, evicting unused prefixes if need be.

        Raises:
            OutOfPages: fewer are available; nothing was taken or evicted.
        """
        if count > self.num_available:
            raise OutOfPages(count, self.num_available)
        num_missing = count - len(self.pages.free)
        if num_missing > 0:
            min_evicted = len(self.numbers) // _MIN_EVICTED_SHARE
            self.pages.release(self.cache.evict(max(num_missing, min_evicted)))
        return self.pages.allocate(count)

    def flush(self) -> int:
        """Frees every cached page that no lease reads; returns how many."""
        return self._evict_all(self.cache)

    def drop_retired(self) -> int:
        """Frees the pages of retired caches that no lease reads; returns how many."""
        num_freed = sum(map(self._evict_all, self.retired))
        self.retired = [cache for cache in self.retired if cache.num_pages]
        return num_freed

    def _evict_all(self, cache: PrefixCache) -> int:
        pages = cache.evict(cache.num_pages)
        self.pages.release(pages)
        return len(pages)


@dataclass(slots=True, eq=False)
class KvLease:
    """The pages of one sequence, in logical order.

    Attributes:
        pages: `[0, num_shared_pages)` belong to the prefix cache and are read only;
            `[num_shared_pages, …)` are this lease's own.
        num_cached_tokens: tokens whose KV was found in the cache when the lease was opened.
        prefix: the cache node of the shared pages, locked by this lease.
        cache: the prefix cache of `prefix`; a retired cache accepts no pages any more.
        salt: prefixes are shared with leases of the same salt only.
        version: increases with every change of `pages`.
    """

    pages: list[int]
    num_cached_tokens: int
    num_shared_pages: int
    group: PageGroup = field(repr=False)
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
    """Alternative last pages of a lease.

    Attributes:
        first_page: index in the lease's `pages` that `pages` replace from; the earlier pages are
            shared with the lease.
    """

    first_page: int
    pages: list[int]
    group: PageGroup = field(repr=False)


class KvLeases:
    """Hands out leases over pages and keeps finished prefixes for reuse.

    Args:
        num_pages: pages of all groups, their padding pages included.
        num_groups: the pages are cut into this many equal ranges, whose first page is padding.

    Attributes:
        num_pages: pages of all groups, without their padding pages.
        num_group_pages: pages of one group: the most that one lease can have.
        num_returns: how often pages were freed or prefixes published. Until it changes, a lease
            that did not fit still does not fit.
    """

    def __init__(
        self, num_pages: int, page_size: int, *, prefix_cache: bool = True, num_groups: int = 1
    ) -> None:
        assert num_pages % num_groups == 0, f"{num_pages} pages are not {num_groups} equal groups"
        self.page_size = page_size
        size = num_pages // num_groups
        self._groups = tuple(
            PageGroup(range(padding + 1, padding + size))
            for padding in range(PADDING_PAGE, num_pages, size)
        )
        self.num_group_pages = size - 1
        self.num_pages = num_groups * self.num_group_pages
        self._caches_prefixes = prefix_cache
        self._leases: dict[int, KvLease] = {}
        self._branches: dict[int, KvBranch] = {}
        self.num_returns = 0

    @classmethod
    def over(cls, pages: Sequence[int], page_size: int, *, prefix_cache: bool = True) -> KvLeases:
        """Returns leases of the given pages of a pool, in one group."""
        leases = cls(1 + len(pages), page_size, prefix_cache=prefix_cache)
        leases._groups = (PageGroup(pages),)
        return leases

    @property
    def num_free_pages(self) -> int:
        return sum(len(group.pages.free) for group in self._groups)

    @property
    def num_cached_pages(self) -> int:
        return sum(cache.num_pages for group in self._groups for cache in group.caches)

    @property
    def num_held_pages(self) -> int:
        return self.num_pages - self.num_free_pages - self.num_cached_pages

    def open(self, token_ids: Sequence[int], salt: str = "", num_tokens: int = 0) -> KvLease:
        """Opens a lease on the longest cached prefix of `token_ids` under `salt`, with pages for
        `num_tokens`.

        At least one token is left to compute, because its logits are needed. Groups are tried by
        their available pages, most first, where each cached page of the prefix counts for
        `CACHED_PAGE_WEIGHT` more.

        Raises:
            OutOfPages: no group has enough pages; nothing changed.
        """
        chunks = self._chunks(token_ids[:-1], salt) if self._caches_prefixes else []
        matches = [(group, *group.cache.match(chunks)) for group in self._groups]
        matches.sort(
            key=lambda match: match[0].num_available + CACHED_PAGE_WEIGHT * len(match[2]),
            reverse=True,
        )
        for group, node, pages in matches:
            group.cache.lock(node)
            count = len(pages)
            lease = KvLease(pages, count * self.page_size, count, group, node, group.cache, salt)
            self._leases[id(lease)] = lease
            if self.try_grow(lease, num_tokens):
                return lease
            self.close(lease, ())
        raise OutOfPages(
            -(-num_tokens // self.page_size), max(group.num_available for group in self._groups)
        )

    def grow(self, lease: KvLease, num_tokens: int) -> None:
        """Makes the lease's pages cover `num_tokens`, evicting unused prefixes if need be.

        Raises:
            OutOfPages: its group has too few pages even then; the lease is unchanged.
        """
        num_missing = -(-num_tokens // self.page_size) - len(lease.pages)
        if num_missing <= 0:
            return
        lease.pages.extend(lease.group.allocate(num_missing))
        lease.version += 1

    def try_grow(self, lease: KvLease, num_tokens: int) -> bool:
        """Grows the lease as `grow` does; returns False, with the lease unchanged, where that
        raises."""
        try:
            self.grow(lease, num_tokens)
        except OutOfPages:
            return False
        return True

    def shrink(self, lease: KvLease, num_tokens: int) -> None:
        """Frees the lease's own pages that `num_tokens` do not need."""
        num_kept = max(-(-num_tokens // self.page_size), lease.num_shared_pages)
        self._free(lease, slice(num_kept, None))

    def drop_first(self, lease: KvLease, num_pages: int) -> None:
        """Frees the first pages of a lease without shared pages; the rest moves to the front."""
        assert not lease.num_shared_pages, "other sequences read these pages"
        self._free(lease, slice(num_pages))

    def _free(self, lease: KvLease, pages: slice) -> None:
        if lease.pages[pages]:
            lease.group.pages.release(lease.pages[pages])
            del lease.pages[pages]
            lease.version += 1
            self.num_returns += 1

    def try_branch(self, lease: KvLease, num_shared: int, num_tokens: int) -> KvBranch | None:
        """Allocates other pages for the tokens `[num_shared, num_tokens)` of a lease; None if too
        few are left. The caller copies the shared tokens of a page that is shared in part."""
        first_page = num_shared // self.page_size
        assert first_page >= lease.num_shared_pages, "a branch would end a cached prefix"
        count = -(-num_tokens // self.page_size) - first_page
        try:
            branch = KvBranch(first_page, lease.group.allocate(count), lease.group)
        except OutOfPages:
            return None
        self._branches[id(branch)] = branch
        return branch

    def drop_branch(self, branch: KvBranch) -> None:

        del self._branches[id(branch)]
        self.num_returns += 1
        branch.group.pages.release(branch.pages)
        branch.pages = []

    def adopt(self, lease: KvLease, branch: KvBranch) -> None:
        """Replaces the lease's last pages with those of its branch, and frees the replaced ones."""
        assert branch.first_page >= lease.num_shared_pages, "the lease shares more than it did"
        lease.pages[branch.first_page :], branch.pages = (
            branch.pages,
            lease.pages[branch.first_page :],
        )
        lease.version += 1
        self.drop_branch(branch)

    def close(self, lease: KvLease, token_ids: Sequence[int]) -> None:
        """Ends the lease. `token_ids` are the tokens with computed KV: their whole pages go to the
        prefix cache, and every other page of the lease's own is freed."""
        del self._leases[id(lease)]
        self.num_returns += 1
        num_computed_pages = len(token_ids) // self.page_size if self._may_share(lease) else 0
        num_kept = max(num_computed_pages, lease.num_shared_pages)
        group = lease.group
        group.pages.release(lease.pages[num_kept:])
        if num_computed_pages > lease.num_shared_pages:
            chunks = self._chunks(token_ids[: num_kept * self.page_size], lease.salt)
            group.pages.release(group.cache.insert(chunks, lease.pages[:num_kept]))
        lease.cache.unlock(lease.prefix)
        if lease.cache is not group.cache:
            group.drop_retired()
        lease.pages = []
        lease.version += 1

    def publish(self, lease: KvLease, token_ids: Sequence[int]) -> None:
        """Caches the whole pages of computed `token_ids` while the lease goes on, so that other
        sequences with the same prompt need not wait for this one to end."""
        num_pages = len(token_ids) // self.page_size
        if not self._may_share(lease) or num_pages <= lease.num_shared_pages:
            return
        self.num_returns += 1
        chunks = self._chunks(token_ids[: num_pages * self.page_size], lease.salt)
        group = lease.group
        group.pages.release(group.cache.insert(chunks, lease.pages[:num_pages]))
        node, pages = group.cache.match(chunks)
        group.cache.lock(node)
        group.cache.unlock(lease.prefix)
        lease.pages[:num_pages] = pages
        lease.version += 1
        lease.prefix, lease.num_shared_pages = node, num_pages

    def flush(self) -> int:
        """Frees every cached page that no lease reads; returns how many."""
        return sum(group.flush() for group in self._groups)

    def retire(self) -> int:
        """Ends the reuse of everything computed so far: the weights changed, or a draft reads
        features that were not kept. Open leases keep their pages, but share none of them any more.
        Returns how many pages were freed."""
        self.num_returns += 1
        for group in self._groups:
            group.retired.append(group.cache)
            group.cache = PrefixCache()
        return sum(group.drop_retired() for group in self._groups)

    def _chunks(self, token_ids: Sequence[int], salt: str) -> list[PageTokens]:
        """Returns the tokens of each whole page; a salt is part of the first page's."""
        size = self.page_size
        starts = range(0, len(token_ids) - size + 1, size)
        chunks: list[PageTokens] = [tuple(token_ids[start : start + size]) for start in starts]
        if salt and chunks:
            chunks[0] = (salt, *chunks[0])
        return chunks

    def _may_share(self, lease: KvLease) -> bool:
        return self._caches_prefixes and lease.cache is lease.group.cache

    def check(self) -> None:
        """Asserts that every page has exactly one owner, in its own group."""
        for group in self._groups:
            leases = [lease for lease in self._leases.values() if lease.group is group]
            branches = [branch for branch in self._branches.values() if branch.group is group]
            nodes = [node for cache in group.caches for node in cache.nodes()]
            cached = [page for node in nodes for page in node.pages]
            held = [page for lease in leases for page in lease.pages[lease.num_shared_pages :]]
            held += [page for branch in branches for page in branch.pages]
            owned, num_free, total = cached + held, len(group.pages.free), len(group.numbers)
            assert len(set(owned)) == len(owned), "a page has two owners"
            assert set(owned) <= set(group.numbers), "a page is in another group"
            assert len(cached) == sum(cache.num_pages for cache in group.caches)
            assert len(owned) + num_free == total, (
                f"free {num_free} + cached {len(cached)} + held {len(held)} is not total {total}"
            )
            locked = {page for node in nodes if node.num_locks for page in node.pages}
            shared = {page for lease in leases for page in lease.pages[: lease.num_shared_pages]}
            assert locked == shared, "locks and leases disagree"
            assert len(locked) == sum(cache.num_locked_pages for cache in group.caches)
