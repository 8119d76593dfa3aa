"""Lists the tensors that a checkpoint must hold, and reads them into fused tensors."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm  # type: ignore[import-untyped]

from shared.errors import CheckpointError
from shared.models.checkpoint import Checkpoint, Cut, WeightFile
from shared.models.weight_copies import WeightCopy, copy_weights

# How many names a message lists before it only counts.
_MAX_NAMES = 5


@dataclass(frozen=True, slots=True)
class WeightPart:
    """One tensor of a checkpoint and where it goes.

    Attributes:
        key: name in the checkpoint.
        shape: shape it must have there.
        index: of a stack `[E, K, N]` or `[E, N]`, the matrix or vector that is read; matrices are
            transposed. None reads a tensor that is no such stack.
        target: name of the tensor it becomes; parts of one target are stacked along axis 0.
        repeats: how often it is repeated along axis 0, as a norm shared by all heads is.
        cut: the part that is read; None reads all.
        row_order: rows are put in this order, in every block of as many; None leaves them.
        dtype: of the tensor it becomes; None takes the model's.
    """

    key: str
    shape: tuple[int, ...]
    target: str
    repeats: int = 1
    cut: Cut | None = None
    row_order: tuple[int, ...] | None = None
    dtype: torch.dtype | None = None
    index: int | None = None

    @property
    def read_shape(self) -> tuple[int, ...]:
        """Shape of the tensor as read."""
        shape = self.shape if self.index is None else self.shape[:0:-1]
        return shape if self.cut is None else self.cut.shape(shape)

    def taken(self, read: Callable[[Cut | None], Tensor]) -> Tensor:
        """Returns what `read`, which may be told a part of the tensor, has for the target."""
        if self.index is None:
            return self._arranged(read(self.cut))
        own = read(Cut(0, self.index, 1))[0]
        own = own if own.dim() == 1 else own.T
        return self._arranged(own if self.cut is None else own[self.cut.slices])

    def _arranged(self, tensor: Tensor) -> Tensor:
        """Returns rows of the tensor in the given order, repeated where asked for."""
        if self.row_order is not None:
            blocks = tensor.reshape(-1, len(self.row_order), *tensor.shape[1:])
            tensor = blocks[:, list(self.row_order)].flatten(0, 1)
        if self.repeats == 1:
            return tensor
        return tensor.repeat(self.repeats, *[1] * (tensor.dim() - 1))

    @property
    def num_rows(self) -> int:
        return self.read_shape[0] * self.repeats


def read_weights(
    checkpoint: Checkpoint,
    parts: Sequence[WeightPart],
    *,
    ignored_prefixes: Sequence[str] = (),
    ignored_suffixes: Sequence[str] = (),
    ignored_keys: Collection[str] = (),
    dtype: torch.dtype,
    device: torch.device,
    show_progress: bool = False,
) -> dict[str, Tensor]:
    """Reads all parts to `device`, cast to `dtype`, stacked into their targets.

    Raises:
        CheckpointError: for missing or unexpected keys, a wrong shape or a damaged file.
    """
    _check_keys(checkpoint, parts, tuple(ignored_prefixes), tuple(ignored_suffixes), ignored_keys)
    targets = empty_targets(parts, dtype, device)
    places = places_of(parts, targets)
    progress = tqdm(
        total=sum(target.nbytes for target in targets.values()),
        desc="weights",
        unit="B",
        unit_scale=True,
        disable=None if show_progress else True,
    )
    with progress:
        for size_bytes in copy_weights(_copies(checkpoint, parts, places), device):
            progress.update(size_bytes)
    return targets


def _copies(
    checkpoint: Checkpoint, parts: Sequence[WeightPart], places: Sequence[Tensor]
) -> Iterator[WeightCopy]:
    for path, indices in _by_file(checkpoint, parts).items():
        weights = checkpoint.open_file(path)
        for index in indices:
            part = parts[index]
            _check_shape(path, weights, part)
            source = part.taken(partial(weights.read, part.key))
            yield WeightCopy(source, places[index])


def stack_weights(
    parts: Sequence[WeightPart],
    read: Callable[[str], Tensor],
    *,
    dtype: torch.dtype,
    device: torch.device,
) -> dict[str, Tensor]:
    """Returns what `read_weights` does, of tensors that `read` makes from their keys."""
    targets = empty_targets(parts, dtype, device)
    for part, place in zip(parts, places_of(parts, targets), strict=True):
        tensor = read(part.key)
        assert tuple(tensor.shape) == part.shape, f"{part.key} has shape {list(tensor.shape)}"
        place.copy_(part.taken(partial(cut_tensor, tensor)))
    return targets


def _check_keys(
    checkpoint: Checkpoint,
    parts: Sequence[WeightPart],
    ignored_prefixes: tuple[str, ...],
    ignored_suffixes: tuple[str, ...],
    ignored_keys: Collection[str],
) -> None:
    expected = {part.key for part in parts}
    missing = expected - checkpoint.files.keys()
    if missing:
        raise CheckpointError(f"{checkpoint.folder} lacks {_listed(missing)}")
    unexpected = {
        key
        for key in checkpoint.files.keys() - expected - set(ignored_keys)
        if not key.startswith(ignored_prefixes) and not key.endswith(ignored_suffixes)
    }
    if unexpected:
        raise CheckpointError(
            f"{checkpoint.folder} has weights that this architecture does not use: "
            f"{_listed(unexpected)}"
        )


def _listed(keys: Iterable[str]) -> str:
    names = sorted(keys)
    more = f" and {len(names) - _MAX_NAMES} more" if len(names) > _MAX_NAMES else ""
    return ", ".join(names[:_MAX_NAMES]) + more


def _check_shape(path: Path, weights: WeightFile, part: WeightPart) -> None:
    if part.key not in weights.keys():  # noqa: SIM118  not a mapping
        raise CheckpointError(f"{path} lacks {part.key}, which the index places there")
    shape = weights.shape(part.key)
    if shape != part.shape:
        raise CheckpointError(
            f"{path}: {part.key} has shape {list(shape)}; the config needs {list(part.shape)}"
        )


def empty_targets(
    parts: Sequence[WeightPart], dtype: torch.dtype, device: torch.device
) -> dict[str, Tensor]:
    """Returns the tensors that `parts` become, not filled."""
    num_rows: dict[str, int] = defaultdict(int)
    trailing = {part.target: part.read_shape[1:] for part in parts}
    dtypes = {part.target: part.dtype or dtype for part in parts}
    for part in parts:
        num_rows[part.target] += part.num_rows
    return {
        target: torch.empty((rows, *trailing[target]), dtype=dtypes[target], device=device)
        for target, rows in num_rows.items()
    }


def places_of(parts: Sequence[WeightPart], targets: Mapping[str, Tensor]) -> list[Tensor]:
    """Returns, for each part, the view of its target that it fills."""
    places: list[Tensor] = []
    next_row: dict[str, int] = defaultdict(int)
    for part in parts:
        start = next_row[part.target]
        next_row[part.target] = start + part.num_rows
        places.append(targets[part.target][start : start + part.num_rows])
    return places


def cut_tensor(tensor: Tensor, cut: Cut | None) -> Tensor:
    """Returns a part of a tensor; None takes all of it."""
    return tensor if cut is None else tensor[cut.slices]


def _by_file(checkpoint: Checkpoint, parts: Sequence[WeightPart]) -> dict[Path, list[int]]:
    """Returns the indices of the parts in each file."""
    by_file: dict[Path, list[int]] = defaultdict(list)
    for index, part in enumerate(parts):
        by_file[checkpoint.files[part.key]].append(index)
    return by_file
