"""What the drafter of a head lends to a target in the same process, for rounds on the device."""

from __future__ import annotations

from dataclasses import dataclass

from shared.kv.leases import KvLeases
from shared.kv.pool import KvPool
from shared.models.heads.head import DraftHead
from shared.runtime.head_runner import HeadRunner


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
    def of_half(cls, runner: HeadRunner, leases: KvLeases, *, max_context_tokens: int) -> HeadLoan:
        """Takes half of the free pages."""
        lease = leases.open(())
        leases.grow(lease, leases.num_free_pages // 2 * leases.page_size)
        return cls(runner.head, runner.pool, tuple(lease.pages), max_context_tokens)
