"""The shared head: an embedded drafter's model for the target's rounds on the device."""

from __future__ import annotations

from dataclasses import dataclass

from shared.kv.leases import KvLeases
from shared.kv.pool import KvPool
from shared.models.heads.head import DraftHead
from shared.runtime.head_runner import HeadRunner

_LENT_EIGHTHS = 7


@dataclass(frozen=True, slots=True, eq=False)
class HeadLoan:
    """A head and KV pages that its drafter keeps off for good.

    Attributes:
        pages: of `pool`.
        max_context_tokens: longest sequence that needs no window.
    """

    head: DraftHead
    pool: KvPool
    pages: tuple[int, ...]
    max_context_tokens: int

    @classmethod
    def of_most(cls, runner: HeadRunner, leases: KvLeases, *, max_context_tokens: int) -> HeadLoan:
        """Takes most of the free pages; the drafter keeps some for requests that have no lane."""
        lease = leases.open(())
        num_lent = leases.num_free_pages * _LENT_EIGHTHS // 8
        leases.grow(lease, num_lent * leases.page_size)
        return cls(runner.head, runner.pool, tuple(lease.pages), max_context_tokens)
