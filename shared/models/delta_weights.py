"""The name map of gated delta layers, and the layer of its tensors."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from shared.kernels.delta_rule import DeltaShape, DeltaWeights
from shared.layers.attention import AttentionShape
from shared.layers.gated_delta import GatedDelta
from shared.layers.linear import Linear
from shared.layers.norm import RmsNorm
from shared.model_options import Quantisation
from shared.models.config import ModelConfig
from shared.models.weights import WeightPart


def delta_parts(config: ModelConfig, source: str, target: str) -> Iterator[WeightPart]:
    """Yields the tensors of one layer, see `decoder_weights.layer_parts`."""
    assert config.delta is not None
    shape, hidden = config.delta.shape, config.hidden_size
    source, num_heads = f"{source}linear_attn.", shape.num_value_heads
    matrices: list[tuple[str, int, str, tuple[int, ...] | None]]
    if config.delta.is_fused:
        size = shape.num_channels + shape.value_size
        matrices = [
            ("in_proj_qkvz", size, "channels", _channel_order(shape)),
            ("in_proj_ba", 2 * num_heads, "gates", _gate_order(shape)),
        ]
    else:
        matrices = [
            ("in_proj_qkv", shape.num_channels, "channels", None),
            ("in_proj_z", shape.value_size, "channels", None),
            ("in_proj_b", num_heads, "gates", None),
            ("in_proj_a", num_heads, "gates", None),
        ]
    for key, size, name, order in matrices:
        yield WeightPart(
            f"{source}{key}.weight", (size, hidden), f"{target}{name}.weight", row_order=order
        )
    taps = (shape.num_channels, 1, shape.window)
    yield WeightPart(f"{source}conv1d.weight", taps, f"{target}taps")
    for key in ("A_log", "dt_bias"):
        yield WeightPart(f"{source}{key}", (num_heads,), f"{target}{key}", dtype=torch.float32)
    yield WeightPart(f"{source}norm.weight", (shape.value_dim,), f"{target}delta_norm")
    yield WeightPart(
        f"{source}out_proj.weight", (hidden, shape.value_size), f"{target}output.weight"
    )


def build_delta(
    config: ModelConfig,
    tensors: dict[str, Tensor],
    shape: AttentionShape,
    layer: int,
    quantisation: Quantisation,
) -> GatedDelta:
    """Takes the tensors of one layer out of the dict."""
    assert config.delta is not None
    prefix = f"layers.{layer}."

    def linear(name: str, quantisation: Quantisation) -> Linear:
        return Linear.of(tensors.pop(f"{prefix}{name}.weight"), None, quantisation)

    return GatedDelta(
        shape=shape,
        delta=config.delta.shape,
        channels=linear("channels", quantisation),
        # A few rows, on which everything behind them depends.
        gates=linear("gates", Quantisation.UNQUANT),
        weights=DeltaWeights(
            tensors.pop(f"{prefix}taps").squeeze(1),
            tensors.pop(f"{prefix}A_log"),
            tensors.pop(f"{prefix}dt_bias"),
        ),
        norm=RmsNorm(tensors.pop(f"{prefix}delta_norm"), config.rms_norm_eps),
        output=linear("output", quantisation),
        layer=config.first_cache_layer(layer),
        state=config.delta.layers.index(layer),
    )


def _channel_order(shape: DeltaShape) -> tuple[int, ...]:
    """Returns the rows of all queries, all keys, all values and all gates, which a checkpoint has
    by key heads."""
    values = shape.value_size // shape.num_key_heads
    return _by_kind(shape.num_key_heads, (shape.key_dim, shape.key_dim, values, values))


def _gate_order(shape: DeltaShape) -> tuple[int, ...]:
    each = shape.num_value_heads // shape.num_key_heads
    return _by_kind(shape.num_key_heads, (each, each))


def _by_kind(num_groups: int, sizes: tuple[int, ...]) -> tuple[int, ...]:
    size, first, order = sum(sizes), 0, list[int]()
    for own in sizes:
        for group in range(num_groups):
            start = group * size + first
            order.extend(range(start, start + own))
        first += own
    return tuple(order)
