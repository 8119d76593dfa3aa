"""The weight files of a model folder, single or sharded, read one tensor at a time."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from shared.errors import CheckpointError
from shared.model_options import LoadFormat
from shared.models.config_file import ConfigFile

_SAFETENSORS = ("model", "safetensors")
_PICKLED = ("pytorch_model", "bin")
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
        """Returns the shape that is left of `whole`."""
        return (*whole[: self.dim], self.length, *whole[self.dim + 1 :])


class WeightFile(Protocol):
    """One open weight file."""

    def keys(self) -> frozenset[str]: ...

    def shape(self, key: str) -> tuple[int, ...]: ...

    def read(self, key: str, cut: Cut | None = None) -> Tensor:
        """Returns a view of the mapped file: its elements are read when they are used."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """Which file of a folder holds which tensor.

    Attributes:
        folder: the model folder.
        files: file of each key.
    """

    folder: Path
    files: Mapping[str, Path]

    @classmethod
    def open(cls, folder: Path, load_format: LoadFormat = LoadFormat.AUTO) -> Checkpoint:
        """Finds the weights: safetensors before pickled, an index before a single file.

        Raises:
            CheckpointError: if there are none in that format, or a file is missing or damaged.
        """
        files = _FILES[load_format]
        for stem, suffix in files:
            index = folder / f"{stem}.{suffix}.index.json"
            single = folder / f"{stem}.{suffix}"
            if index.is_file():
                weight_map = ConfigFile.read(index).nested("weight_map")
                return cls(folder, {key: folder / weight_map.text(key) for key in weight_map})
            if single.is_file():
                keys = open_weights(single).keys()
                return cls(folder, dict.fromkeys(keys, single))
        names = " nor ".join(f"{stem}.{suffix}" for stem, suffix in files)
        raise CheckpointError(f"{folder} has {'neither' if len(files) > 1 else 'no'} {names}")


def open_weights(path: Path) -> WeightFile:
    """Opens one weight file; its tensors are in the host's memory.

    Raises:
        CheckpointError: if it is missing, truncated or not what its suffix says.
    """
    if not path.is_file():
        raise CheckpointError(f"{path} is missing")
    if path.suffix == ".safetensors":
        return _SafetensorsFile(path)
    return _PickledFile(path)


class _SafetensorsFile:
    def __init__(self, path: Path) -> None:
        try:
            self._file: Any = safe_open(path, framework="pt")
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{path} cannot be read: {error}") from error

    def keys(self) -> frozenset[str]:
        return frozenset(self._file.keys())

    def shape(self, key: str) -> tuple[int, ...]:
        return tuple(self._file.get_slice(key).get_shape())

    def read(self, key: str, cut: Cut | None = None) -> Tensor:
        tensor: Tensor
        if cut is None:
            tensor = self._file.get_tensor(key)
        else:
            tensor = self._file.get_slice(key)[cut.slices]
        return tensor


class _PickledFile:
    """Loaded with `weights_only`: a pickle that holds anything but tensors is refused."""

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

    def read(self, key: str, cut: Cut | None = None) -> Tensor:
        tensor = self._tensors[key]
        return tensor if cut is None else tensor[cut.slices]
