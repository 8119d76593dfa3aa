"""Poison where nobody may read."""

from __future__ import annotations

from shared.kv.pool import KvPool

POISON = 1e3
"""Visible in whatever reads it; finite, because plain torch multiplies hidden keys by 0."""


def poison_padding(pool: KvPool) -> KvPool:
    """Fills the padding page of `pool`, and returns it."""
    pool.storage[:, :, : pool.page_size] = POISON
    return pool
