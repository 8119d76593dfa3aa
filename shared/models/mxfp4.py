"""Weights that a checkpoint stores in 4 bits: blocks of 32 elements of e2m1 with a scale each.

Source: OCP Microscaling Formats (MX) Specification 1.0, sections 5.3.3 and 6.3, as gpt-oss's files
have it: `{key}_blocks` `[..., N, K / 32, 16]` holds two elements a byte, the lower half first, and
`{key}_scales` `[..., N, K / 32]` the exponents, biased by 127.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import torch
from torch import Tensor

MXFP4 = "mxfp4"
_BLOCKS, _SCALES = "_blocks", "_scales"
_BLOCK_SIZE = 32
_EXPONENT_BIAS = 127
_SIZES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


@dataclass(frozen=True, slots=True)
class PackedKeys:
    """Keys of the two tensors of a 4-bit weight."""

    blocks: str
    scales: str


def packed_keys(keys: Collection[str]) -> dict[str, PackedKeys]:
    """Returns the weights in 4 bits among the keys of a checkpoint, by the name of the whole."""
    found = {}
    for key in keys:
        name = key.removesuffix(_BLOCKS)
        if name != key and f"{name}{_SCALES}" in keys:
            found[name] = PackedKeys(key, f"{name}{_SCALES}")
    return found


def unpacked_shape(blocks: tuple[int, ...]) -> tuple[int, ...]:
    """Returns the shape `[..., K, N]` of a weight from that of its blocks."""
    *stack, num_rows, num_blocks, _ = blocks
    return (*stack, num_blocks * _BLOCK_SIZE, num_rows)


def unpacked(blocks: Tensor, scales: Tensor) -> Tensor:
    """Returns the weight `[..., K, N]` in bfloat16, which holds every element exactly."""
    sizes = torch.tensor((*_SIZES, *(-size for size in _SIZES)), dtype=torch.float32)
    halves = torch.stack((blocks & 0x0F, blocks >> 4), dim=-1).flatten(-2)
    elements = sizes[halves.int()]
    exponents = scales.int().unsqueeze(-1) - _EXPONENT_BIAS
    weight = torch.ldexp(elements, exponents).to(torch.bfloat16)
    return weight.flatten(-2).transpose(-1, -2)
