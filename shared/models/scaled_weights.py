"""Quantised weights of checkpoints, in three formats.

**8 bits with scales.** A weight `[N, K]` of int8 or e4m3 stands for `weight * scale`. The key of
its scales is its own key and `_scale` (compressed-tensors) or `_scale_inv` (block FP8; despite the
name it is multiplied too). There is one scale for the whole weight, one per output channel, or one
per block of rows and columns.

**MXFP4.** Blocks of 32 elements of e2m1 with one scale each.

Source: OCP Microscaling Formats (MX) Specification 1.0, sections 5.3.3 and 6.3, as gpt-oss's files
have it: `{key}_blocks` `[..., N, K / 32, 16]` holds two elements per byte, the lower half first,
and `{key}_scales` `[..., N, K / 32]` the exponents, biased by 127.

**Packed integers**: `pack-quantized` of compressed-tensors. A weight `[N, K]` of 4 or 8 bits is
stored under its own key and `_packed` as `[N, words]` int32, and its shape under `_shape`. A word
of 32 bits holds 8 or 4 columns, the first in the lowest bits, each as the number plus half of the
range. Its scales are those of the 8-bit format.

Source: compressed_tensors/compressors, `pack_to_int32`.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shared.errors import CheckpointError
from shared.kernels.linear import WORD_BLOCK
from shared.models.config_file import ConfigFile

MXFP4 = "mxfp4"
_BLOCKS, _SCALES = "_blocks", "_scales"
_BLOCK_SIZE = 32
_EXPONENT_BIAS = 127
_SIZES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)

_PACKED, _SHAPE = "_packed", "_shape"
_WORD_BITS = 32
_NUM_BITS = (4, 8)
QUANTIZATION_CONFIG = "quantization_config"
EIGHT_BIT_DTYPES = (torch.int8, torch.float8_e4m3fn)
SCALE_SUFFIXES = ("_scale", "_scale_inv")
_COMPRESSED_TENSORS = "compressed-tensors"
_BLOCK_FP8 = "fp8"
_MODELOPT = "modelopt"
_FBGEMM_FP8 = "fbgemm_fp8"
_METHODS = (_COMPRESSED_TENSORS, _BLOCK_FP8, _MODELOPT, _FBGEMM_FP8, MXFP4)
_FP8_ALGO = "FP8"  # of modelopt: a scale per tensor
# Formats of compressed-tensors, with the bits that a number may have; the last one packs words.
_FORMATS = {
    "int-quantized": (8,),
    "float-quantized": (8,),
    "naive-quantized": (8,),
    "pack-quantized": (4, 8),
}
_STRATEGIES = ("tensor", "channel", "group", "block")


@dataclass(frozen=True, slots=True)
class PackedKeys:
    """Keys of the two tensors of a weight in MXFP4."""

    blocks: str
    scales: str


def packed_keys(keys: Collection[str]) -> dict[str, PackedKeys]:
    """Returns the weights in MXFP4 among the keys of a checkpoint, by weight name."""
    weights = {}
    for key in keys:
        name = key.removesuffix(_BLOCKS)
        if name != key and f"{name}{_SCALES}" in keys:
            weights[name] = PackedKeys(key, f"{name}{_SCALES}")
    return weights


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


@dataclass(frozen=True, slots=True)
class WordKeys:
    """Keys of a packed weight's words and of its shape."""

    words: str
    shape: str


def word_keys(keys: Collection[str]) -> dict[str, WordKeys]:
    """Returns the packed weights among the keys of a checkpoint, by weight name."""
    names = (key.removesuffix(_PACKED) for key in keys if key.endswith(_PACKED))
    return {
        name: WordKeys(f"{name}{_PACKED}", f"{name}{_SHAPE}")
        for name in names
        if f"{name}{_SHAPE}" in keys
    }


def unpacked_words(words: Tensor, num_columns: int) -> Tensor | None:
    """Returns int8 `[N, K]` of `[N, words]`; None if the words fit K columns of neither 4 nor 8
    bits."""
    for bits in _NUM_BITS:
        per_word = _WORD_BITS // bits
        if words.shape[1] == -(-num_columns // per_word):
            shifts = torch.arange(per_word, dtype=torch.int32) * bits
            fields = (words.unsqueeze(-1) >> shifts) & (2**bits - 1)
            numbers: Tensor = fields.flatten(1)[:, :num_columns] - 2 ** (bits - 1)
            return numbers.to(torch.int8)
    return None


@dataclass(frozen=True, slots=True)
class ScaleBlock:
    """The rows and columns of a weight that share a scale."""

    rows: int
    columns: int

    def shape(self, weight: Sequence[int]) -> tuple[int, int]:
        """Returns the shape of the scales of a weight `[N, K]`."""
        num_rows, num_columns = weight
        return -(-num_rows // self.rows), -(-num_columns // self.columns)


@dataclass(frozen=True, slots=True)
class StoredLayout:
    """Layout of a matrix `[N, K]` that stays in a checkpoint's 8 bits.

    Attributes:
        dtype: int8 or float8_e4m3fn.
        depth: K.
        block: the block that shares a scale: 128 columns of 128 rows or of one row; None where a
            row has one scale.
    """

    dtype: torch.dtype
    depth: int
    block: ScaleBlock | None

    @property
    def step(self) -> int:
        """Rows of the matrix per row of scales."""
        return 1 if self.block is None else self.block.rows

    @property
    def num_columns(self) -> int:
        """Columns of the scales."""
        return 1 if self.block is None else -(-self.depth // self.block.columns)


def held_block(block: ScaleBlock, *, is_aligned: bool) -> ScaleBlock | None:
    """Returns the block in which products can use a checkpoint's scales; None if they cannot.

    Args:
        is_aligned: the held rows begin and end at borders of blocks.
    """
    if block.columns != WORD_BLOCK:
        return None
    return block if is_aligned and block.rows == WORD_BLOCK else ScaleBlock(1, WORD_BLOCK)


def scale_block(config: ConfigFile) -> ScaleBlock | None:
    """Returns the block that shares a scale, by a model's config; None for a channel or a tensor.

    Raises:
        CheckpointError: for a quantisation that is not supported.
    """
    if QUANTIZATION_CONFIG not in config:
        return None
    quantised = config.nested(QUANTIZATION_CONFIG)
    method = quantised.text("quant_method", "")
    if method == _BLOCK_FP8:
        return _block(quantised, quantised.integers("weight_block_size"))
    if method == _COMPRESSED_TENSORS:
        return _compressed_block(quantised)
    if method not in _METHODS:
        raise _unsupported(config, "quant_method", method, _METHODS)
    if method == _MODELOPT and (algo := quantised.text("quant_algo", "")) != _FP8_ALGO:
        raise _unsupported(config, "quant_algo", algo, (_FP8_ALGO,))
    return None


def scale_keys(keys: Collection[str]) -> dict[str, str]:
    """Returns the key of the scales of every weight with scales."""
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
    """Returns float32 scales that broadcast to a part of a weight.

    Args:
        scales: `[]`, `[1]` or `[1, 1]` for the whole weight; `[N]` or `[N, 1]`; or one per block.
        weight: shape `[N, K]` of the whole weight.
        part: slices of the weight's axes; an axis without one is whole.

    Returns:
        None if the scales have none of these shapes.
    """
    grid = scale_grid(scales, weight, block)
    if grid is None:
        return None
    whole = [slice(None)] * (2 - len(part))
    steps = (1, 1) if block is None else (block.rows, block.columns)
    # An axis with one scale broadcasts.
    for dim, (size, step, cut) in enumerate(zip(weight, steps, (*part, *whole), strict=True)):
        if grid.shape[dim] != 1:
            grid = grid.index_select(dim, torch.arange(size)[cut] // step)
    return grid


def scale_grid(scales: Tensor, weight: Sequence[int], block: ScaleBlock | None) -> Tensor | None:
    """Returns the scales as a float32 matrix, in which an axis of size 1 broadcasts; None as
    `spread_scales`."""
    if len(weight) != 2:
        return None
    scales, shape, num_rows = scales.float(), tuple(scales.shape), weight[0]
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
            f"{quantised.path}: config_groups have different blocks of shared scales; all must be "
            f"the same"
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
