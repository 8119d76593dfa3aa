"""Attention whose sliding layers have other heads than the rest, read from a config."""

from __future__ import annotations

from dataclasses import dataclass

from shared.errors import CheckpointError
from shared.models.config_file import ConfigFile


@dataclass(frozen=True, slots=True)
class HybridConfig:
    """Sizes of attention with two kinds of layers, which share the heads of queries.

    The cache has one shape: as many key heads as the layers with more of them, and values as wide
    as keys.

    Attributes:
        full_kv_heads: key heads of layers that see everything.
        sliding_kv_heads: those of sliding layers.
        value_dim: of a head's values.
        value_scale: what values are multiplied by.
    """

    full_kv_heads: int
    sliding_kv_heads: int
    value_dim: int
    value_scale: float

    @property
    def cached_kv_heads(self) -> int:
        return max(self.full_kv_heads, self.sliding_kv_heads)


def read_hybrid(config: ConfigFile) -> HybridConfig:
    """Raises: CheckpointError for a missing or mistyped key, or counts that do not fit."""
    full = config.integer("num_key_value_heads")
    hybrid = HybridConfig(
        full_kv_heads=full,
        sliding_kv_heads=config.integer("swa_num_key_value_heads", 2 * full),
        value_dim=config.integer("v_head_dim"),
        value_scale=config.number("attention_value_scale", 1.0),
    )
    cached = hybrid.cached_kv_heads
    if cached % full or cached % hybrid.sliding_kv_heads:
        raise CheckpointError(
            f"{config.path}: num_key_value_heads is {full} and swa_num_key_value_heads "
            f"{hybrid.sliding_kv_heads}; one must be a multiple of the other"
        )
    return hybrid
