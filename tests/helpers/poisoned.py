"""Poison values for memory that nothing may read."""

from __future__ import annotations

from shared.kv.pool import KvPool

POISON = 1e3
"""Large, so that any result that reads it is visibly wrong. Finite, because plain torch multiplies
masked keys by 0."""


def poison_padding(pool: KvPool) -> KvPool:
    """Fills the padding page of `pool`, and returns it."""
    pool.storage[:, :, : pool.page_size] = POISON
    return pool
