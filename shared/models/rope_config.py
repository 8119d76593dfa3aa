"""Rotary parameters from config.json, in the older spelling and in that of transformers 5."""

from __future__ import annotations

import math

from shared.errors import CheckpointError
from shared.layers.rotary import RopeConfig, RopeScaling
from shared.models.config_file import ConfigFile

_DEFAULT_THETA = 10_000.0


def read_rope(config: ConfigFile, *, max_position_embeddings: int) -> RopeConfig:
    """Reads `rope_parameters`, or `rope_theta` beside `rope_scaling`.

    Raises:
        CheckpointError: for a scaling scheme or a partial rotation that is not supported.
    """
    spelling = "rope_parameters" if "rope_parameters" in config else "rope_scaling"
    rope = config.nested(spelling)
    theta = rope.number("rope_theta", config.number("rope_theta", _DEFAULT_THETA))
    scaling = _scaling(config, rope)
    partial = rope.number("partial_rotary_factor", config.number("partial_rotary_factor", 1.0))
    if partial != 1.0:
        raise CheckpointError(f"{config.path}: partial_rotary_factor is {partial:g}; it must be 1")
    if scaling is RopeScaling.NONE:
        return RopeConfig(theta)
    original_length = max_position_embeddings
    if scaling is not RopeScaling.DYNAMIC:
        original_length = rope.integer("original_max_position_embeddings", original_length)
        original_length = config.integer("original_max_position_embeddings", original_length)
    if scaling is RopeScaling.YARN:
        return _yarn(rope, theta, original_length, max_position_embeddings)
    return RopeConfig(
        theta=theta,
        scaling=scaling,
        factor=rope.number("factor"),
        original_length=original_length,
        low_freq_factor=rope.number("low_freq_factor", 1.0),
        high_freq_factor=rope.number("high_freq_factor", 4.0),
    )


def _scaling(config: ConfigFile, rope: ConfigFile) -> RopeScaling:
    name = rope.text("rope_type", rope.text("type", RopeScaling.NONE.value))
    try:
        return RopeScaling(name)
    except ValueError as error:
        known = ", ".join(scaling.value for scaling in RopeScaling)
        raise CheckpointError(
            f"{config.path}: rope scaling is {name!r}; it must be one of {known}"
        ) from error


def _yarn(
    rope: ConfigFile, theta: float, original_length: int, max_position_embeddings: int
) -> RopeConfig:
    factor = rope.number("factor", max_position_embeddings / original_length)
    return RopeConfig(
        theta=theta,
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
