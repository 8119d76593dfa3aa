"""Scales of an e4m3 KV cache, computed from the weights alone, without calibration data.

A root-mean-square norm bounds its output: `x / rms(x)` of H channels has length `sqrt(H)`. So every
key and value has a bound that no input exceeds, and with a scale that brings the bound into e4m3's
range no value is ever clipped. The bound is loose, about `sqrt(H)` above typical values, which
costs nothing: e4m3 has full precision over 2^15.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from shared.errors import CheckpointError
from shared.kernels.cache import LARGEST
from shared.layers.attention import Attention
from shared.layers.decoder_layer import DecoderLayer
from shared.layers.gated_delta import GatedDelta
from shared.layers.linear import Linear
from shared.models.decoder import Decoder

# Activations are rounded, to bfloat16 at worst, before and after the product.
_ROUNDING = 1.02


def kv_scales(decoder: Decoder) -> Tensor:
    """Returns `[2, num_layers, num_kv_heads]` float32 powers of two, keys first.

    Raises:
        CheckpointError: keys and values have no bound, since the family has no norm before the
            attention, or the family is not supported otherwise.
    """
    attention_factor = decoder.config.rope.attention_factor
    scales = [_layer_scales(layer, attention_factor) for layer in decoder.layers]
    return torch.stack(scales, dim=1)


def _layer_scales(layer: DecoderLayer, attention_factor: float) -> Tensor:
    """Returns `[2, num_kv_heads]`."""
    attention, shape = layer.attention, layer.attention.shape
    if isinstance(attention, GatedDelta):
        raise CheckpointError(
            "--kv-cache-dtype is fp8_e4m3; it is not supported for linear attention"
        )
    if not isinstance(attention, Attention):
        raise CheckpointError(
            "--kv-cache-dtype is fp8_e4m3; it is not supported for latent attention"
        )
    if shape.is_special or attention.narrow is not None:
        raise CheckpointError(
            "--kv-cache-dtype is fp8_e4m3; it is not supported for models with soft caps, sinks or "
            "two kinds of heads"
        )
    channels = _channel_bounds(layer, attention.qkv).view(-1, shape.head_dim)
    values = channels[-shape.num_kv_heads :]
    keys = channels[shape.num_heads : -shape.num_kv_heads]
    if attention.qk_norm is not None:
        weights = attention.qk_norm.weight.float()[shape.num_heads :].abs()
        keys = weights * math.sqrt(shape.head_dim)
    # A rotation mixes two channels of a head.
    keys = keys * math.sqrt(2.0) * attention_factor
    bounds = torch.stack((keys.amax(1), values.amax(1))) * (_ROUNDING / LARGEST)
    return torch.exp2(bounds.clamp(min=2.0**-100).log2().ceil())


def _channel_bounds(layer: DecoderLayer, qkv: Linear) -> Tensor:
    """Returns `[N]`, the largest absolute value of each channel of queries, keys and values."""
    if layer.attention_norm is None:
        raise CheckpointError(
            "--kv-cache-dtype is fp8_e4m3; it needs a norm before attention, which bounds keys and "
            "values, and this model has none"
        )
    norm = layer.attention_norm.weight.float()
    weight = qkv.dense().float() * norm
    lengths: Tensor = torch.linalg.vector_norm(weight, dim=1) * math.sqrt(len(norm))
    return lengths if qkv.bias is None else lengths + qkv.bias.float().abs()
