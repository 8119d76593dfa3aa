"""Ownership of KV pages: sequences hold leases, the cache holds finished prefixes, nobody else.

Every live page is in exactly one state: *free*, *cached* (in the prefix cache, whether or not a
sequence is reading it) or *held* (by one lease or one branch alone). `free + cached + held = total`
always.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from shared.kv.pages import OutOfPages, PagePool
from shared.kv.prefix import PrefixCache, PrefixNode


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
        """Ends the reuse of everything computed so far: the weights are others. Leases go on with
        the pages they have, and share none of them any more; returns how many pages came free."""
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


__all__ = ["KvBranch", "KvLease", "KvLeases", "OutOfPages"]
