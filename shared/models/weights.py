"""Lists the tensors that a checkpoint must hold, and reads them into fused tensors. Matrices in
8 bits are converted to the model's dtype, or stay in 8 bits with their scales.

Several threads copy weights from mapped files into the tensors. Reading a mapped file costs a page
fault every few pages: one thread reads a few gigabytes a second, a tenth of what a GPU can receive.
A GPU receives at that speed only from pinned memory, so every thread has two pinned buffers: it
fills one while the other is being copied to the GPU.
"""

from __future__ import annotations

import os
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType

import torch
from torch import Tensor
from tqdm import tqdm  # type: ignore[import-untyped]

from shared.errors import CheckpointError
from shared.kernels.linear import keeps_row_bits
from shared.kernels.quantised import StoredMatrix
from shared.layers.linear import STORED_DTYPES
from shared.model_options import Quantisation
from shared.models.checkpoint import Checkpoint, Cut, ScaledFile
from shared.models.scaled_weights import ScaleBlock, StoredLayout, held_block

# The most names that a message lists; it only counts the rest.
_MAX_NAMES = 5


@dataclass(frozen=True, slots=True)
class WeightCopy:
    """One copy of a tensor.

    Attributes:
        source: tensor in host memory, of any strides.
        place: destination of the same shape, contiguous; elements are converted to its dtype.
    """

    source: Tensor
    place: Tensor


@dataclass(frozen=True, slots=True)
class CopyPace:
    """How fast weights are copied.

    Attributes:
        chunk_bytes: size of one copy and of a pinned buffer; a single longer row is one copy.
    """

    max_threads: int
    chunk_bytes: int


FULL_PACE = CopyPace(8, 16 * 2**20)
SERVING_PACE = CopyPace(1, 2**20)
"""The pace while the GPU serves: a step's own copies wait for at most two small weight copies. With
eight threads, steps of an H200 took 20 ms longer, and 110 ms while the threads pinned buffers."""


def copy_weights(
    copies: Iterable[WeightCopy], device: torch.device, pace: CopyPace = FULL_PACE
) -> Iterator[int]:
    """Copies all tensors to places on `device`, and yields the bytes written by each part.

    When the iterator has ended, all copies are done.

    Raises:
        Exception: any error that `copies` raises.
    """
    copier = _GpuCopier(device, pace.chunk_bytes) if device.type == "cuda" else _HostCopier()
    num_threads = min(pace.max_threads, os.cpu_count() or 1)
    try:
        with ThreadPoolExecutor(num_threads, thread_name_prefix="weights") as pool:
            waiting: deque[Future[int]] = deque()
            for part in _parts(copies, pace.chunk_bytes):
                waiting.append(pool.submit(copier.copy, part))
                if len(waiting) > 2 * num_threads:
                    yield waiting.popleft().result()
            for copied in waiting:
                yield copied.result()
    finally:
        copier.finish()


def _parts(copies: Iterable[WeightCopy], chunk_bytes: int) -> Iterator[WeightCopy]:
    """Yields the copies, split along their first axis into parts that fit in a buffer."""
    for copy in copies:
        row_bytes = copy.source[0].nbytes
        num_rows = max(chunk_bytes // row_bytes, 1)
        sources, places = torch.split(copy.source, num_rows), torch.split(copy.place, num_rows)
        yield from map(WeightCopy, sources, places)


class _HostCopier:
    """Copies within host memory."""

    def copy(self, part: WeightCopy) -> int:
        """Returns the bytes written."""
        part.place.copy_(part.source)
        return part.place.nbytes

    def finish(self) -> None:
        """Does nothing: no copy is pending."""


class _Buffer:
    """Pinned memory, and the event after the last copy from it."""

    def __init__(self, chunk_bytes: int) -> None:
        self.memory = torch.empty(0, dtype=torch.uint8)
        self._chunk_bytes = chunk_bytes
        self.is_free = torch.cuda.Event()  # type: ignore[no-untyped-call]

    def filled(self, source: Tensor) -> Tensor:
        """Returns a contiguous pinned copy of `source`, once the buffer is free."""
        self.is_free.synchronize()
        if len(self.memory) < source.nbytes:
            size_bytes = max(source.nbytes, self._chunk_bytes)
            self.memory = torch.empty(size_bytes, dtype=torch.uint8, pin_memory=True)
        staged = self.memory[: source.nbytes].view(source.dtype).view(source.shape)
        return staged.copy_(source)


class _GpuCopier(threading.local):
    """Pinned buffers and a stream for copies to a GPU; each thread that uses it gets its own."""

    def __init__(self, device: torch.device, chunk_bytes: int) -> None:
        self._device = device
        with torch.cuda.device(device):
            self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
            # Work queued earlier may still read the destination's memory.
            self._stream.wait_stream(torch.cuda.default_stream())
            self._buffers = deque((_Buffer(chunk_bytes), _Buffer(chunk_bytes)))

    def copy(self, part: WeightCopy) -> int:

        buffer = self._buffers[0]
        self._buffers.rotate()
        with torch.cuda.stream(self._stream):
            part.place.copy_(buffer.filled(part.source), non_blocking=True)
            buffer.is_free.record()
        return part.place.nbytes

    def finish(self) -> None:
        """Waits for the copies of all threads."""
        torch.cuda.synchronize(self._device)


@dataclass(frozen=True, slots=True)
class WeightPart:
    """One tensor of a checkpoint, and the tensor that it becomes part of.

    Attributes:
        key: name in the checkpoint.
        shape: shape it must have there.
        target: name of the tensor it becomes; parts of one target are stacked along axis 0.
        repeats: how often it is repeated along axis 0, for a norm that all heads share.
        cut: the part that is read; None reads all.
        row_order: new order of the rows in each block of as many; None keeps the order.
        dtype: dtype of the target; None takes the model's.
        index: the matrix or vector to read from a stack `[E, K, N]` or `[E, N]`; matrices are
            transposed, unless `keeps_order`. None for a tensor that is no such stack.
        may_stay: a matrix in 8 bits may be held so, with its scales, if all of the target may.
    """

    key: str
    shape: tuple[int, ...]
    target: str
    repeats: int = 1
    cut: Cut | None = None
    row_order: tuple[int, ...] | None = None
    dtype: torch.dtype | None = None
    index: int | None = None
    keeps_order: bool = False
    may_stay: bool = False

    @classmethod
    def matrix(
        cls,
        key: str,
        shape: tuple[int, int],
        target: str,
        cut: Cut | None = None,
        row_order: tuple[int, ...] | None = None,
    ) -> WeightPart:
        """Returns a matrix that may stay in 8 bits."""
        return cls(key, shape, target, cut=cut, row_order=row_order, may_stay=True)

    @property
    def read_shape(self) -> tuple[int, ...]:
        """Shape of the tensor as read."""
        shape = self.shape
        if self.index is not None:
            shape = shape[1:] if self.keeps_order else shape[:0:-1]
        return shape if self.cut is None else self.cut.shape(shape)

    def load(self, read: Callable[[Cut | None], Tensor]) -> Tensor:
        """Returns this part's rows of the target; `read` returns the tensor or a cut of it."""
        if self.index is None:
            return self._arranged(read(self.cut))
        matrix = read(Cut(0, self.index, 1))[0]
        matrix = matrix if matrix.dim() == 1 or self.keeps_order else matrix.T
        return self._arranged(matrix if self.cut is None else matrix[self.cut.slices])

    def _arranged(self, tensor: Tensor) -> Tensor:
        """Returns the rows of the tensor in `row_order`, repeated `repeats` times."""
        if self.row_order is not None:
            blocks = tensor.reshape(-1, len(self.row_order), *tensor.shape[1:])
            tensor = blocks[:, list(self.row_order)].flatten(0, 1)
        if self.repeats == 1:
            return tensor
        return tensor.repeat(self.repeats, *[1] * (tensor.dim() - 1))

    @property
    def num_rows(self) -> int:
        return self.read_shape[0] * self.repeats

    @property
    def source_rows(self) -> Tensor:
        """For each row of the part, its row in the checkpoint's matrix."""
        rows = torch.arange(self.shape[0])
        is_cut = self.cut is not None and self.cut.dim == 0
        return self._arranged(cut_tensor(rows, self.cut) if is_cut else rows)

    @property
    def columns(self) -> Cut | None:
        return self.cut if self.cut is not None and self.cut.dim == 1 else None


class WeightTensors(dict[str, Tensor]):
    """Tensors by target name; builders remove them from this dict.

    Attributes:
        dtype: dtype of the model.
        layouts: layouts of the matrices that are held in 8 bits; see `scales_of` for their scales.
    """

    def __init__(
        self,
        tensors: Mapping[str, Tensor],
        dtype: torch.dtype,
        layouts: Mapping[str, StoredLayout],
    ) -> None:
        super().__init__(tensors)
        self.dtype, self.layouts = dtype, layouts

    def pop_matrix(self, name: str) -> Tensor | StoredMatrix:
        """Removes a matrix, with its scales if it has any, and returns it."""
        weight, scales = self.pop(name), self.pop(scales_of(name), None)
        return weight if scales is None else StoredMatrix(weight, scales, self.dtype)


def scales_of(target: str) -> str:
    """Returns the name of a target's scales."""
    return f"{target}.scales"


Stays = Callable[[str, StoredLayout], bool]
"""A rule: whether a target that can be held in an 8-bit layout stays in it."""


def stays_stored(quantisation: Quantisation, dtype: torch.dtype, device: torch.device) -> Stays:
    """Returns the rule for a model in `dtype` on `device`. With a quantisation, matrices of its
    8-bit type stay. Without one, all stay that the batch-invariant kernel can multiply."""
    stored = STORED_DTYPES.get(quantisation)
    if stored is None:
        return lambda _, layout: keeps_row_bits(device, dtype, layout.depth)
    return lambda _, layout: layout.dtype is stored


def read_weights(
    checkpoint: Checkpoint,
    parts: Sequence[WeightPart],
    *,
    ignored_prefixes: Sequence[str] = (),
    ignored_suffixes: Sequence[str] = (),
    ignored_keys: Collection[str] = (),
    dtype: torch.dtype,
    device: torch.device,
    stays: Stays | None = None,
    pace: CopyPace = FULL_PACE,
    is_pinned: bool = False,
    show_progress: bool = False,
) -> WeightTensors:
    """Reads all parts to `device`, cast to `dtype`, stacked into their targets.

    Args:
        stays: which matrices of the checkpoint in 8 bits stay in 8 bits; None converts all.
        is_pinned: see `empty_targets`.

    Raises:
        CheckpointError: for missing or unexpected keys, a wrong shape or a damaged file.
    """
    _check_keys(checkpoint, parts, tuple(ignored_prefixes), tuple(ignored_suffixes), ignored_keys)
    files = {path: checkpoint.open_file(path) for path in _by_file(checkpoint, parts)}
    layouts: dict[str, StoredLayout] = {}
    if stays is not None:
        possible = _stored_layouts(checkpoint, files, parts)
        layouts = {target: layout for target, layout in possible.items() if stays(target, layout)}
    targets = empty_targets(parts, dtype, device, layouts, is_pinned=is_pinned)
    progress = tqdm(
        total=sum(target.nbytes for target in targets.values()),
        desc="weights",
        unit="B",
        unit_scale=True,
        disable=None if show_progress else True,
    )
    with progress:
        for size_bytes in copy_weights(_copies(checkpoint, files, parts, targets), device, pace):
            progress.update(size_bytes)
    return targets


def _copies(
    checkpoint: Checkpoint,
    files: Mapping[Path, ScaledFile],
    parts: Sequence[WeightPart],
    targets: WeightTensors,
) -> Iterator[WeightCopy]:
    places, scale_places = places_of(parts, targets), _scale_places(parts, targets)
    for path, indices in _by_file(checkpoint, parts).items():
        weights = files[path]
        for index in indices:
            part, place = parts[index], places[index]
            _check_shape(path, weights, part)
            layout = targets.layouts.get(part.target)
            if layout is None:
                yield WeightCopy(part.load(partial(weights.read, part.key)), place)
                continue
            numbers = part.load(partial(_codes, weights, part.key))
            yield WeightCopy(numbers, place.view(torch.uint8))
            yield WeightCopy(_part_scales(weights, part, layout, checkpoint), scale_places[index])


def _codes(weights: ScaledFile, key: str, cut: Cut | None) -> Tensor:
    """Returns 8-bit numbers as bytes, which torch can index for every 8-bit dtype."""
    return weights.read_stored(key, cut).view(torch.uint8)


def _stored_layouts(
    checkpoint: Checkpoint, files: Mapping[Path, ScaledFile], parts: Sequence[WeightPart]
) -> dict[str, StoredLayout]:
    """Returns the targets that can be held in 8 bits."""
    by_target: dict[str, list[WeightPart]] = defaultdict(list)
    for part in parts:
        by_target[part.target].append(part)
    layouts = {}
    for target, target_parts in by_target.items():
        if not all(part.may_stay and part.key in checkpoint.scales for part in target_parts):
            continue
        dtypes = {files[checkpoint.files[part.key]].stored_dtype(part.key) for part in target_parts}
        dtype = dtypes.pop()
        if dtypes or dtype is None:
            continue
        layout = layout_of(target_parts, dtype, checkpoint.block)
        if layout is not None:
            layouts[target] = layout
    return layouts


def layout_of(
    parts: Sequence[WeightPart], dtype: torch.dtype, block: ScaleBlock | None
) -> StoredLayout | None:
    """Returns the 8-bit layout of a target whose parts the checkpoint has in 8 bits; None if it has
    to be converted.

    Args:
        block: see `Checkpoint`.
    """
    depth = parts[0].read_shape[1]
    if block is None:
        return StoredLayout(dtype, depth, None)
    # All processes of a group agree: their cuts are equally long, so all are aligned or none is.
    cuts = [part.columns for part in parts if part.columns is not None]
    if any(cut.start % block.columns or cut.length % block.columns for cut in cuts):
        return None
    is_aligned = all(_is_aligned(part, block.rows, is_last=part is parts[-1]) for part in parts)
    held = held_block(block, is_aligned=is_aligned)
    return None if held is None else StoredLayout(dtype, depth, held)


def _is_aligned(part: WeightPart, num_rows: int, *, is_last: bool) -> bool:
    """Whether each block of rows of a target comes from one block of the checkpoint."""
    if part.num_rows % num_rows and not is_last:
        return False
    if part.row_order is None:
        return part.cut is None or part.cut.dim == 1 or part.cut.start % num_rows == 0
    blocks = part.source_rows // num_rows
    firsts = torch.arange(len(blocks)) // num_rows * num_rows
    return torch.equal(blocks, blocks[firsts])


def _part_scales(
    weights: ScaledFile, part: WeightPart, layout: StoredLayout, checkpoint: Checkpoint
) -> Tensor:
    """Returns the scales of a part of a matrix, in the layout in which they are held."""
    grid, block = weights.scales(part.key), checkpoint.block
    if block is None:
        return grid.expand(part.shape[0], 1)[part.source_rows]
    num_rows, num_columns = block.shape(part.shape)
    grid = grid.expand(num_rows, num_columns)
    if part.columns is not None:
        start, length = part.columns.start, part.columns.length
        grid = grid[:, start // block.columns : (start + length) // block.columns]
    return grid[part.source_rows[:: layout.step] // block.rows]


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
        raise CheckpointError(f"{checkpoint.folder} lacks {listed(missing)}")
    unexpected = {
        key
        for key in checkpoint.files.keys() - expected - set(ignored_keys)
        if not key.startswith(ignored_prefixes) and not key.endswith(ignored_suffixes)
    }
    if unexpected:
        raise CheckpointError(
            f"{checkpoint.folder} has weights that this architecture does not use: "
            f"{listed(unexpected)}"
        )


def listed(keys: Iterable[str]) -> str:
    """Returns the first names, and how many more there are, as text."""
    names = sorted(keys)
    more = f" and {len(names) - _MAX_NAMES} more" if len(names) > _MAX_NAMES else ""
    return ", ".join(names[:_MAX_NAMES]) + more


def _check_shape(path: Path, weights: ScaledFile, part: WeightPart) -> None:
    if part.key not in weights.keys():  # noqa: SIM118  not a mapping
        raise CheckpointError(f"{path} lacks {part.key}, which the index places there")
    shape = weights.shape(part.key)
    if shape != part.shape:
        raise CheckpointError(
            f"{path}: {part.key} has shape {list(shape)}; the config needs {list(part.shape)}"
        )


def empty_targets(
    parts: Sequence[WeightPart],
    dtype: torch.dtype,
    device: torch.device,
    layouts: Mapping[str, StoredLayout] = MappingProxyType({}),
    *,
    is_pinned: bool = False,
) -> WeightTensors:
    """Returns the tensors that `parts` become, uninitialised.

    Args:
        layouts: layouts of targets that are held in 8 bits.
        is_pinned: allocates pinned host memory, which a GPU reads at the full speed of its link.
            torch caches freed pinned memory, so that later tensors of this size cost nothing.
    """
    num_rows: dict[str, int] = defaultdict(int)
    trailing = {part.target: part.read_shape[1:] for part in parts}
    dtypes = {part.target: part.dtype or dtype for part in parts}
    for part in parts:
        num_rows[part.target] += part.num_rows
    stored = {target: layout for target, layout in layouts.items() if target in num_rows}
    dtypes |= {target: layout.dtype for target, layout in stored.items()}
    shapes = {target: (rows, *trailing[target]) for target, rows in num_rows.items()}
    for target, layout in stored.items():
        shapes[scales_of(target)] = -(-num_rows[target] // layout.step), layout.num_columns
        dtypes[scales_of(target)] = torch.float32
    tensors = {
        name: torch.empty(shape, dtype=dtypes[name], device=device, pin_memory=is_pinned)
        for name, shape in shapes.items()
    }
    return WeightTensors(tensors, dtype, stored)


def places_of(parts: Sequence[WeightPart], targets: Mapping[str, Tensor]) -> list[Tensor]:
    """Returns, for each part, the view of its target that it fills."""
    places: list[Tensor] = []
    next_row: dict[str, int] = defaultdict(int)
    for part in parts:
        start = next_row[part.target]
        next_row[part.target] = start + part.num_rows
        places.append(targets[part.target][start : start + part.num_rows])
    return places


def _scale_places(parts: Sequence[WeightPart], targets: WeightTensors) -> dict[int, Tensor]:
    """Returns, for each part in 8 bits, the view of its target's scales that it fills."""
    places: dict[int, Tensor] = {}
    next_row: dict[str, int] = defaultdict(int)
    for index, part in enumerate(parts):
        layout = targets.layouts.get(part.target)
        if layout is not None:
            start, num_rows = next_row[part.target], -(-part.num_rows // layout.step)
            next_row[part.target] = start + num_rows
            scales = targets[scales_of(part.target)]
            places[index] = scales[start : start + num_rows]
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
