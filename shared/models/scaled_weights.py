"""Weights that a checkpoint stores in few bits, with their scales beside them.

A weight `[N, K]` of int8 or e4m3 stands for `weight * scale`. Its scales are under its own key and
`_scale` (compressed-tensors) or `_scale_inv` (block FP8, which multiplies as well, for all its
name): one for all, one an output channel, or one a block of rows and columns.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shared.errors import CheckpointError
from shared.models.config_file import ConfigFile
from shared.models.mxfp4 import MXFP4

QUANTIZATION_CONFIG = "quantization_config"
EIGHT_BIT_DTYPES = (torch.int8, torch.float8_e4m3fn)
SCALE_SUFFIXES = ("_scale", "_scale_inv")

_COMPRESSED_TENSORS = "compressed-tensors"
_BLOCK_FP8 = "fp8"
# Those of compressed-tensors: the bits that a number may have, see `packed_words` for the last.
_FORMATS = {
    "int-quantized": (8,),
    "float-quantized": (8,),
    "naive-quantized": (8,),
    "pack-quantized": (4, 8),
}
_STRATEGIES = ("tensor", "channel", "group", "block")


@dataclass(frozen=True, slots=True)
class ScaleBlock:
    """The rows and columns of a weight that share a scale."""

    rows: int
    columns: int

    def shape(self, weight: Sequence[int]) -> tuple[int, int]:
        """Returns the shape of the scales of a weight `[N, K]`."""
        num_rows, num_columns = weight
        return -(-num_rows // self.rows), -(-num_columns // self.columns)


def scale_block(config: ConfigFile) -> ScaleBlock | None:
    """Returns what shares a scale by a model's config; None where that is a channel or a tensor.

    Raises:
        CheckpointError: for a quantisation that is not supported.
    """
    if QUANTIZATION_CONFIG not in config:
        return None
    quantised = config.nested(QUANTIZATION_CONFIG)
    method = quantised.text("quant_method", "")
    if method == _BLOCK_FP8:
        return _block(quantised, quantised.integers("weight_block_size"))
    if method == MXFP4:
        return None
    if method == _COMPRESSED_TENSORS:
        return _compressed_block(quantised)
    raise _unsupported(config, "quant_method", method, (_COMPRESSED_TENSORS, _BLOCK_FP8, MXFP4))


def scale_keys(keys: Collection[str]) -> dict[str, str]:
    """Returns the key of the scales of every weight that has some."""
    return {
        key: f"{key}{suffix}"
        for suffix in SCALE_SUFFIXES
        for key in keys
        if f"{key}{suffix}" in keys
    }


def spread_scales(
    scales: Tensor,
    weight: Sequence[int],
    block: ScaleBlock | None,
    part: Sequence[slice] = (),
) -> Tensor | None:
    """Returns float32 factors that broadcast to a part of a weight.

    Args:
        scales: `[]`, `[1]` or `[1, 1]` for all; `[N]` or `[N, 1]`; or one a block.
        weight: shape `[N, K]` of the whole weight.
        part: slices of the weight's axes; an axis without one is whole.

    Returns:
        None if the scales have none of these shapes.
    """
    if len(weight) != 2:
        return None
    grid = _as_grid(scales.float(), weight, block)
    if grid is None:
        return None
    whole = [slice(None)] * (2 - len(part))
    steps = (1, 1) if block is None else (block.rows, block.columns)
    # An axis with one scale broadcasts.
    for dim, (size, step, cut) in enumerate(zip(weight, steps, (*part, *whole), strict=True)):
        if grid.shape[dim] != 1:
            grid = grid.index_select(dim, torch.arange(size)[cut] // step)
    return grid


def _as_grid(scales: Tensor, weight: Sequence[int], block: ScaleBlock | None) -> Tensor | None:
    """Returns the scales in two axes."""
    shape, num_rows = tuple(scales.shape), weight[0]
    if scales.numel() == 1:
        return scales.reshape(1, 1)
    if block is not None:
        return scales if shape == block.shape(weight) else None
    return scales.reshape(num_rows, 1) if shape in ((num_rows,), (num_rows, 1)) else None


def _compressed_block(quantised: ConfigFile) -> ScaleBlock | None:
    name = quantised.text("format", "")
    if name not in _FORMATS:
        raise _unsupported(quantised, "format", name, tuple(_FORMATS))
    groups, bits = quantised.nested("config_groups"), _FORMATS[name]
    blocks = {_group_block(groups.nested(group).nested("weights"), bits) for group in groups}
    if len(blocks) > 1:
        raise CheckpointError(
            f"{quantised.path}: config_groups differ in what shares a scale; one way is supported"
        )
    return blocks.pop() if blocks else None


def _group_block(weights: ConfigFile, supported_bits: Sequence[int]) -> ScaleBlock | None:
    bits, strategy = weights.integer("num_bits", 8), weights.text("strategy", "tensor")
    if bits not in supported_bits:
        raise _unsupported(weights, "num_bits", bits, supported_bits)
    if not weights.flag("symmetric", True):
        raise _unsupported(weights, "symmetric", False, (True,))
    if strategy not in _STRATEGIES:
        raise _unsupported(weights, "strategy", strategy, _STRATEGIES)
    if strategy == "group":
        return _block(weights, (1, weights.integer("group_size")))
    return _block(weights, weights.integers("block_structure")) if strategy == "block" else None


def _block(config: ConfigFile, sizes: Sequence[int]) -> ScaleBlock | None:
    if not sizes:
        return None
    if len(sizes) != 2 or min(sizes) < 1:
        raise CheckpointError(
            f"{config.path}: {list(sizes)} share a scale; it must be rows and columns, 1 or more"
        )
    return ScaleBlock(sizes[0], sizes[1])


def _unsupported(
    config: ConfigFile, key: str, value: object, supported: Sequence[object]
) -> CheckpointError:
    names = ", ".join(map(str, supported))
    return CheckpointError(
        f"{config.path}: {key} of {QUANTIZATION_CONFIG} is {value!r}; supported: {names}"
    )
