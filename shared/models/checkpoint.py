"""The weight files of a model folder, single or sharded, read one tensor at a time."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from shared.errors import CheckpointError
from shared.model_options import LoadFormat
from shared.models.config_file import CONFIG_FILE, ConfigFile
from shared.models.scaled_weights import (
    EIGHT_BIT_DTYPES,
    SCALE_SUFFIXES,
    PackedKeys,
    ScaleBlock,
    WordKeys,
    packed_keys,
    scale_block,
    scale_grid,
    scale_keys,
    spread_scales,
    unpacked,
    unpacked_shape,
    unpacked_words,
    word_keys,
)

_SAFETENSORS = ("model", "safetensors")
_PICKLED = ("pytorch_model", "bin")
_SAFETENSORS_DTYPES = {"I8": torch.int8, "F8_E4M3": torch.float8_e4m3fn}
_FILES = {
    LoadFormat.AUTO: (_SAFETENSORS, _PICKLED),
    LoadFormat.SAFETENSORS: (_SAFETENSORS,),
    LoadFormat.PT: (_PICKLED,),
}


@dataclass(frozen=True, slots=True)
class Cut:
    """A part of a tensor: `[start, start + length)` along `dim`."""

    dim: int
    start: int
    length: int

    @property
    def slices(self) -> tuple[slice, ...]:
        return (*[slice(None)] * self.dim, slice(self.start, self.start + self.length))

    def shape(self, whole: tuple[int, ...]) -> tuple[int, ...]:
        """Returns the shape of this part of a tensor of shape `whole`."""
        return (*whole[: self.dim], self.length, *whole[self.dim + 1 :])


class WeightFile(Protocol):
    """One open weight file."""

    def keys(self) -> frozenset[str]: ...

    def shape(self, key: str) -> tuple[int, ...]: ...

    def stored_dtype(self, key: str) -> torch.dtype | None:
        """Returns the dtype if it is one of `EIGHT_BIT_DTYPES`, else None."""

    def read(self, key: str, cut: Cut | None = None) -> Tensor:
        """Returns a view of the mapped file: its elements are read when they are used."""


@dataclass(frozen=True, slots=True)
class StoredScales:
    """Key and file of the scales of a quantised weight."""

    key: str
    path: Path


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """Maps each tensor of a folder to its file.

    Attributes:
        files: file of each weight; keys of scales and packed data are replaced by the weight's.
        block: the block that shares a scale; None where a channel or the whole weight does.
        packed: keys of the tensors of each weight in MXFP4.
        words: keys of the tensors of each weight of integers packed into words.
    """

    folder: Path
    files: Mapping[str, Path]
    scales: Mapping[str, StoredScales]
    block: ScaleBlock | None
    packed: Mapping[str, PackedKeys]
    words: Mapping[str, WordKeys]

    @classmethod
    def open(cls, folder: Path, load_format: LoadFormat = LoadFormat.AUTO) -> Checkpoint:
        """Finds the weights: prefers safetensors to pickled files, and an index to a single file.

        Raises:
            CheckpointError: if there are none in that format, or a file is missing or damaged.
        """
        files = _FILES[load_format]
        for stem, suffix in files:
            index = folder / f"{stem}.{suffix}.index.json"
            single = folder / f"{stem}.{suffix}"
            if index.is_file():
                weight_map = ConfigFile.read(index).nested("weight_map")
                return cls._of(folder, {key: folder / weight_map.text(key) for key in weight_map})
            if single.is_file():
                keys = open_weights(single).keys()
                return cls._of(folder, dict.fromkeys(keys, single))
        names = " nor ".join(f"{stem}.{suffix}" for stem, suffix in files)
        raise CheckpointError(f"{folder} has {'neither' if len(files) > 1 else 'no'} {names}")

    @property
    def size_bytes(self) -> int:
        """Size of the files that hold the weights."""
        return sum(file.stat().st_size for file in set(self.files.values()))

    @classmethod
    def _of(cls, folder: Path, files: Mapping[str, Path]) -> Checkpoint:
        config, packed, words = folder / CONFIG_FILE, packed_keys(files), word_keys(files)
        wholes = {name: files[weight.blocks] for name, weight in packed.items()}
        wholes |= {name: files[weight.words] for name, weight in words.items()}
        keys = scale_keys({*files, *wholes})
        parts = {*keys.values()}
        for blocks in packed.values():
            parts |= {blocks.blocks, blocks.scales}
        for word in words.values():
            parts |= {word.words, word.shape}
        return cls(
            folder,
            {key: path for key, path in files.items() if key not in parts} | wholes,
            {weight: StoredScales(key, files[key]) for weight, key in keys.items()},
            scale_block(ConfigFile.read(config)) if config.is_file() else None,
            packed,
            words,
        )

    def open_file(self, path: Path) -> ScaledFile:
        """Opens one of `files`. Quantised weights are read dequantised, in float32; those in MXFP4
        in bfloat16.

        Raises:
            CheckpointError: as `open_weights`; when read, also for scales that are missing or of
                a wrong shape.
        """
        return ScaledFile(path, self)

    def shape(self, key: str) -> tuple[int, ...]:

        return self.open_file(self.files[key]).shape(key)

    def read(self, key: str) -> Tensor:
        """Returns one of `files`, see `open_file`."""
        return self.open_file(self.files[key]).read(key)


def open_weights(path: Path) -> WeightFile:
    """Opens one weight file; its tensors are in host memory.

    Raises:
        CheckpointError: if it is missing, truncated or not what its suffix says.
    """
    if not path.is_file():
        raise CheckpointError(f"{path} is missing")
    if path.suffix == ".safetensors":
        return _SafetensorsFile(path)
    return _PickledFile(path)


class ScaledFile:
    """A file of a checkpoint whose scales may be in other files."""

    def __init__(self, path: Path, checkpoint: Checkpoint) -> None:
        self._path = path
        self._checkpoint = checkpoint
        self._files = {path: open_weights(path)}
        keys = self._files[path].keys()
        names = {name for name, weight in checkpoint.packed.items() if weight.blocks in keys}
        names |= {name for name, weight in checkpoint.words.items() if weight.words in keys}
        self._keys = keys | names

    def keys(self) -> frozenset[str]:
        return self._keys

    def shape(self, key: str) -> tuple[int, ...]:
        packed, words = self._checkpoint.packed.get(key), self._checkpoint.words.get(key)
        if packed is not None:
            return unpacked_shape(self._files[self._path].shape(packed.blocks))
        if words is not None:
            return tuple(self._files[self._path].read(words.shape).tolist())
        return self._files[self._path].shape(key)

    def read(self, key: str, cut: Cut | None = None) -> Tensor:
        packed = self._checkpoint.packed.get(key)
        if packed is not None:
            return self._unpacked(key, packed, cut)
        weight = self.read_stored(key, cut)
        stored, is_packed = self._checkpoint.scales.get(key), weight.dtype in EIGHT_BIT_DTYPES
        if stored is None and not is_packed:
            return weight
        if stored is None:
            missing = " or ".join(f"{key}{suffix}" for suffix in SCALE_SUFFIXES)
            raise CheckpointError(f"{self._path}: {key} is {weight.dtype} and {missing} is missing")
        if not is_packed:
            raise CheckpointError(
                f"{self._path}: {key} is {weight.dtype} and has {stored.key}; with scales it must "
                f"be one of {', '.join(map(str, EIGHT_BIT_DTYPES))}"
            )
        scales, block = self._read_scales(stored), self._checkpoint.block
        factors = spread_scales(scales, self.shape(key), block, () if cut is None else cut.slices)
        if factors is None:
            raise self._shape_error(key, stored)
        return weight.float() * factors

    def stored_dtype(self, key: str) -> torch.dtype | None:
        """Returns the dtype of `read_stored` where a weight has scales; else None."""
        if key not in self._checkpoint.scales or key not in self._keys:
            return None
        if key in self._checkpoint.words:
            return torch.int8
        return self._files[self._path].stored_dtype(key)

    def read_stored(self, key: str, cut: Cut | None = None) -> Tensor:
        """Returns the stored numbers of a weight that is not in MXFP4, before scaling."""
        words = self._checkpoint.words.get(key)
        if words is None:
            return self._files[self._path].read(key, cut)
        return self._integers(key, words, cut)

    def scales(self, key: str) -> Tensor:
        """Returns the scales of a weight in 8 bits as a float32 matrix, see `scale_grid`.

        Raises:
            CheckpointError: as `Checkpoint.open_file`.
        """
        stored = self._checkpoint.scales[key]
        grid = scale_grid(self._read_scales(stored), self.shape(key), self._checkpoint.block)
        if grid is None:
            raise self._shape_error(key, stored)
        return grid

    def _integers(self, key: str, packed: WordKeys, cut: Cut | None) -> Tensor:
        """Returns the int8 numbers in words; a cut of columns is taken after unpacking."""
        rows = cut if cut is not None and cut.dim == 0 else None
        words, shape = self._files[self._path].read(packed.words, rows), self.shape(key)
        numbers = unpacked_words(words, shape[1])
        if numbers is None or self._files[self._path].shape(packed.words)[0] != shape[0]:
            raise CheckpointError(
                f"{self._path}: {packed.words} has shape {list(words.shape)}; {key} of shape "
                f"{list(shape)} needs a word for 8 columns of 4 bits, or for 4 of 8"
            )
        return numbers if rows is not None or cut is None else numbers[cut.slices]

    def _unpacked(self, key: str, packed: PackedKeys, cut: Cut | None) -> Tensor:
        """Returns a weight in MXFP4; a cut must have whole matrices."""
        assert cut is None or cut.dim == 0, f"{key} is cut within its matrices"
        weights = self._files[self._path]
        if packed.scales not in weights.keys():  # noqa: SIM118  not a mapping
            raise CheckpointError(f"{self._path} lacks {packed.scales}, which {key} needs")
        blocks, scales = weights.read(packed.blocks, cut), weights.read(packed.scales, cut)
        if blocks.shape[:-1] != scales.shape:
            raise CheckpointError(
                f"{self._path}: {packed.scales} has shape {list(scales.shape)}; "
                f"{packed.blocks} of shape {list(blocks.shape)} needs {list(blocks.shape[:-1])}"
            )
        return unpacked(blocks, scales)

    def _read_scales(self, stored: StoredScales) -> Tensor:
        if stored.path not in self._files:
            self._files[stored.path] = open_weights(stored.path)
        weights = self._files[stored.path]
        if stored.key not in weights.keys():  # noqa: SIM118  not a mapping
            raise CheckpointError(f"{stored.path} lacks {stored.key}, which the index places there")
        return weights.read(stored.key)

    def _shape_error(self, key: str, stored: StoredScales) -> CheckpointError:
        shape, block = self.shape(key), self._checkpoint.block
        expected = [shape[0], 1] if block is None or len(shape) != 2 else list(block.shape(shape))
        actual = self._files[stored.path].shape(stored.key)
        return CheckpointError(
            f"{stored.path}: {stored.key} has shape {list(actual)}; {key} of shape "
            f"{list(shape)} needs {expected} or [1]"
        )


class _SafetensorsFile:
    def __init__(self, path: Path) -> None:
        try:
            self._file: Any = safe_open(path, framework="pt")
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{path} cannot be read: {error}") from error

    def keys(self) -> frozenset[str]:
        return self._keys

    @cached_property
    def _keys(self) -> frozenset[str]:
        """The keys, cached: they are needed for every tensor, and a mixture of experts has
        thousands."""
        return frozenset(self._file.keys())

    def shape(self, key: str) -> tuple[int, ...]:
        return tuple(self._file.get_slice(key).get_shape())

    def stored_dtype(self, key: str) -> torch.dtype | None:
        return _SAFETENSORS_DTYPES.get(self._file.get_slice(key).get_dtype())

    def read(self, key: str, cut: Cut | None = None) -> Tensor:
        tensor: Tensor
        if cut is None:
            tensor = self._file.get_tensor(key)
        else:
            tensor = self._file.get_slice(key)[cut.slices]
        return tensor


class _PickledFile:
    """Loaded with `weights_only`: torch refuses a pickle that holds anything other than tensors."""

    def __init__(self, path: Path) -> None:
        try:
            self._tensors: dict[str, Tensor] = torch.load(
                path, map_location="cpu", weights_only=True, mmap=True
            )
        except (OSError, EOFError, RuntimeError, pickle.UnpicklingError) as error:
            raise CheckpointError(f"{path} cannot be read: {error}") from error

    def keys(self) -> frozenset[str]:
        return frozenset(self._tensors)

    def shape(self, key: str) -> tuple[int, ...]:
        return tuple(self._tensors[key].shape)

    def stored_dtype(self, key: str) -> torch.dtype | None:
        dtype = self._tensors[key].dtype
        return dtype if dtype in EIGHT_BIT_DTYPES else None

    def read(self, key: str, cut: Cut | None = None) -> Tensor:
        tensor = self._tensors[key]
        return tensor if cut is None else tensor[cut.slices]
