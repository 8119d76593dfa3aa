"""Rotary parameters from config.json, in the older spelling and in that of transformers 5."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from shared.errors import CheckpointError
from shared.layers.rotary import RopeConfig, RopeScaling
from shared.models.config_file import ConfigFile

FULL_ATTENTION = "full_attention"
SLIDING_ATTENTION = "sliding_attention"
_OLDER_NAMES = {"su": RopeScaling.LONGROPE.value}


@dataclass(frozen=True, slots=True)
class RopeDefaults:
    """Defaults for keys that a config leaves out.

    Attributes:
        theta_key: where older configs have theta.
        is_interleaved: see `RopeConfig`; few configs say.
    """

    theta: float = 10_000.0
    theta_key: str = "rope_theta"
    partial: float = 1.0
    is_interleaved: bool = False


def read_rope(
    config: ConfigFile,
    *,
    max_position_embeddings: int,
    layer_type: str = FULL_ATTENTION,
    defaults: RopeDefaults = RopeDefaults(),
) -> RopeConfig:
    """Reads `rope_parameters`, or `rope_theta` beside `rope_scaling`.

    Args:
        layer_type: whose parameters, where the config has some for each type of layer.

    Raises:
        CheckpointError: for a scaling scheme or a partial rotation that is not supported.
    """
    spelling = "rope_parameters" if "rope_parameters" in config else "rope_scaling"
    rope = config.nested(spelling)
    if layer_type in rope:
        rope = rope.nested(layer_type)
    elif layer_type != FULL_ATTENTION:
        # The older spelling has scaling for the other layers only.
        rope = ConfigFile(config.path, {})
    theta = rope.number("rope_theta", config.number(defaults.theta_key, defaults.theta))
    scaling = _scaling(config, rope)
    partial = rope.number(
        "partial_rotary_factor", config.number("partial_rotary_factor", defaults.partial)
    )
    if not 0.0 < partial <= 1.0:
        raise CheckpointError(
            f"{config.path}: partial_rotary_factor is {partial:g}; it must be in (0, 1]"
        )
    is_interleaved = config.flag("rope_interleave", defaults.is_interleaved)
    plain = RopeConfig(theta, partial=partial, is_interleaved=is_interleaved)
    if scaling is RopeScaling.NONE:
        return plain
    original_length = max_position_embeddings
    if scaling is not RopeScaling.DYNAMIC:
        original_length = rope.integer("original_max_position_embeddings", original_length)
        original_length = config.integer("original_max_position_embeddings", original_length)
    if scaling is RopeScaling.YARN:
        return _yarn(rope, plain, original_length, max_position_embeddings)
    if scaling is RopeScaling.LONGROPE:
        return _longrope(rope, plain, original_length, max_position_embeddings)
    return replace(
        plain,
        scaling=scaling,
        factor=rope.number("factor"),
        original_length=original_length,
        low_freq_factor=rope.number("low_freq_factor", 1.0),
        high_freq_factor=rope.number("high_freq_factor", 4.0),
    )


def _scaling(config: ConfigFile, rope: ConfigFile) -> RopeScaling:
    name = rope.text("rope_type", rope.text("type", RopeScaling.NONE.value))
    try:
        return RopeScaling(_OLDER_NAMES.get(name, name))
    except ValueError as error:
        known = ", ".join(scaling.value for scaling in RopeScaling)
        raise CheckpointError(
            f"{config.path}: rope scaling is {name!r}; it must be one of {known}"
        ) from error


def _yarn(
    rope: ConfigFile, plain: RopeConfig, original_length: int, max_position_embeddings: int
) -> RopeConfig:
    factor = rope.number("factor", max_position_embeddings / original_length)
    return replace(
        plain,
        scaling=RopeScaling.YARN,
        factor=factor,
        original_length=original_length,
        beta_fast=rope.number("beta_fast", 32.0),
        beta_slow=rope.number("beta_slow", 1.0),
        attention_factor=rope.number("attention_factor", _yarn_attention(rope, factor)),
        truncate=rope.flag("truncate", True),
    )


def _yarn_attention(rope: ConfigFile, factor: float) -> float:
    """Source: Peng et al., arXiv 2309.00071, equation 22, with DeepSeek's two multipliers."""
    mscale, mscale_all = rope.number("mscale", 0.0), rope.number("mscale_all_dim", 0.0)
    if mscale and mscale_all:
        return _temperature(factor, mscale) / _temperature(factor, mscale_all)
    return _temperature(factor, 1.0)


def _temperature(factor: float, multiplier: float) -> float:
    return 1.0 if factor <= 1.0 else 0.1 * multiplier * math.log(factor) + 1.0


def _longrope(
    rope: ConfigFile, plain: RopeConfig, original_length: int, max_position_embeddings: int
) -> RopeConfig:
    """Source: Ding et al., LongRoPE, arXiv 2402.13753, and the code of Phi-3."""
    factor = rope.number("factor", max_position_embeddings / original_length)
    attention = 1.0
    if factor > 1.0:
        attention = math.sqrt(1.0 + math.log(factor) / math.log(original_length))
    return replace(
        plain,
        scaling=RopeScaling.LONGROPE,
        factor=factor,
        original_length=original_length,
        attention_factor=rope.number("attention_factor", attention),
        short_factors=rope.numbers("short_factor"),
        long_factors=rope.numbers("long_factor"),
    )
