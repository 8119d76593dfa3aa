"""A draft model with KV pages that its drafter keeps off, for the rounds of a target."""

from __future__ import annotations

from dataclasses import dataclass

from shared.kv.leases import KvLeases
from shared.runtime.tree_model import TreeModel

_SHARED_EIGHTHS = 7


@dataclass(frozen=True, slots=True, eq=False)
class SharedHead:
    """A draft head, or a language model, as rounds use it.

    Attributes:
        pages: of the model's pool, for good.
        max_context_tokens: longest sequence that needs no window.
    """

    model: TreeModel
    pages: tuple[int, ...]
    max_context_tokens: int

    @classmethod
    def of_most(cls, model: TreeModel, leases: KvLeases, *, max_context_tokens: int) -> SharedHead:
        """Takes most of the free pages; the drafter keeps some for requests that have no lane."""
        lease = leases.open(())
        num_shared = leases.num_free_pages * _SHARED_EIGHTHS // 8
        leases.grow(lease, num_shared * leases.page_size)
        return cls(model, tuple(lease.pages), max_context_tokens)
