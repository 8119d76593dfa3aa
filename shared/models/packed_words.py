"""Integers that a checkpoint packs into words of 32 bits: `pack-quantized` of compressed-tensors.

A weight `[N, K]` of 4 or 8 bits stands under its own key and `_packed` as `[N, words]` int32,
beside its shape under `_shape`. A word holds 8 or 4 columns, the first in the lowest bits, each as
the number plus half of the range. Its scales are those of any weight in few bits, see
`scaled_weights`.

Source: compressed_tensors/compressors, `pack_to_int32`.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import torch
from torch import Tensor

_PACKED, _SHAPE = "_packed", "_shape"
_WORD_BITS = 32
_NUM_BITS = (4, 8)


@dataclass(frozen=True, slots=True)
class WordKeys:
    """Keys of a packed weight's words and of its shape."""

    words: str
    shape: str


def word_keys(keys: Collection[str]) -> dict[str, WordKeys]:
    """Returns the packed weights among the keys of a checkpoint, by the name of the whole."""
    names = (key.removesuffix(_PACKED) for key in keys if key.endswith(_PACKED))
    return {
        name: WordKeys(f"{name}{_PACKED}", f"{name}{_SHAPE}")
        for name in names
        if f"{name}{_SHAPE}" in keys
    }


def unpacked_words(words: Tensor, num_columns: int) -> Tensor | None:
    """Returns int8 `[N, K]` of `[N, words]`; None where neither 4 nor 8 bits make K columns."""
    for bits in _NUM_BITS:
        in_a_word = _WORD_BITS // bits
        if words.shape[1] == -(-num_columns // in_a_word):
            shifts = torch.arange(in_a_word, dtype=torch.int32) * bits
            fields = (words.unsqueeze(-1) >> shifts) & (2**bits - 1)
            numbers: Tensor = fields.flatten(1)[:, :num_columns] - 2 ** (bits - 1)
            return numbers.to(torch.int8)
    return None
