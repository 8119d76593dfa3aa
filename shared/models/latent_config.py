"""Latent attention, read from a config."""

from __future__ import annotations

import math
from dataclasses import dataclass

from shared.models.config_file import ConfigFile


@dataclass(frozen=True, slots=True)
class LatentConfig:
    """Sizes of attention with latent vectors, see `LatentAttention`.

    Attributes:
        query_rank: width of the compressed queries; None makes them of the input.
        latent_dim: of the vector that becomes keys and values.
        straight_dim: of a head's query and key without rotation.
        rotary_dim: of their rotated part.
        value_dim: of a head's values.
    """

    query_rank: int | None
    latent_dim: int
    straight_dim: int
    rotary_dim: int
    value_dim: int

    @property
    def query_dim(self) -> int:
        """Size of a head's query and key."""
        return self.straight_dim + self.rotary_dim

    @property
    def row_dim(self) -> int:
        """Size of a token's row in the KV cache."""
        return self.latent_dim + self.rotary_dim


def read_latent(config: ConfigFile) -> LatentConfig:
    """Raises: CheckpointError for a missing or mistyped key."""
    return LatentConfig(
        query_rank=config.integer("q_lora_rank") if "q_lora_rank" in config else None,
        latent_dim=config.integer("kv_lora_rank"),
        straight_dim=config.integer("qk_nope_head_dim"),
        rotary_dim=config.integer("qk_rope_head_dim"),
        value_dim=config.integer("v_head_dim"),
    )


def latent_scale(config: ConfigFile, latent: LatentConfig) -> float:
    """Returns the factor of the scores: stretched rotation brings one of its own.

    Source: DeepSeek-V2, arXiv 2405.04434, section 3.1.4, as its code has it.
    """
    scale: float = latent.query_dim**-0.5
    spelling = "rope_parameters" if "rope_parameters" in config else "rope_scaling"
    rope = config.nested(spelling)
    factor, multiplier = rope.number("factor", 1.0), rope.number("mscale_all_dim", 0.0)
    if factor <= 1.0 or not multiplier:
        return scale
    temperature = 0.1 * multiplier * math.log(factor) + 1.0
    return scale * temperature * temperature
