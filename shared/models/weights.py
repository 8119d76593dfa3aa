"""Lists the tensors that a checkpoint must hold, and reads them into fused tensors. Matrices in
8 bits become numbers of the model's dtype, or stay what they are and keep their scales.

Weights from mapped files to their places, on several threads.

Copying from a mapped file reads it, with a page fault every few pages: one thread brings a few
gigabytes a second, a tenth of what a GPU takes in. A GPU takes in that much from pinned memory
only, so every thread has two pinned buffers: it fills one while the other is on its way.
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
from shared.models.scaled_weights import ScaleBlock, StoredLayout, block_held

# How many names a message lists before it only counts.
_MAX_NAMES = 5


@dataclass(frozen=True, slots=True)
class WeightCopy:
    """One tensor to be copied, of any strides.

    Attributes:
        source: in the host's memory.
        place: of the same shape, contiguous; takes the elements in its own dtype.
    """

    source: Tensor
    place: Tensor


@dataclass(frozen=True, slots=True)
class CopyPace:
    """How fast weights are copied.

    Attributes:
        max_threads: that copy at once.
        chunk_bytes: of a copy, and of a pinned buffer; a row more where rows are longer.
    """

    max_threads: int
    chunk_bytes: int


AT_ONCE = CopyPace(8, 16 * 2**20)
BESIDE_STEPS = CopyPace(1, 2**20)
"""While the GPU serves: what a step sends to the device waits for no more than two small copies.
Beside eight threads, steps of an H200 took 20 ms longer, and 110 ms while their buffers were
pinned."""


def copy_weights(
    copies: Iterable[WeightCopy], device: torch.device, pace: CopyPace = AT_ONCE
) -> Iterator[int]:
    """Copies everything to places on `device`, and yields the bytes written of each part.

    All is there when the iterator has ended, for whatever the caller queues next.

    Raises:
        Exception: whatever `copies` raises.
    """
    lane = _GpuLane(device, pace.chunk_bytes) if device.type == "cuda" else _HostLane()
    num_threads = min(pace.max_threads, os.cpu_count() or 1)
    try:
        with ThreadPoolExecutor(num_threads, thread_name_prefix="weights") as pool:
            waiting: deque[Future[int]] = deque()
            for part in _parts(copies, pace.chunk_bytes):
                waiting.append(pool.submit(lane.copy, part))
                if len(waiting) > 2 * num_threads:
                    yield waiting.popleft().result()
            for each in waiting:
                yield each.result()
    finally:
        lane.finish()


def _parts(copies: Iterable[WeightCopy], chunk_bytes: int) -> Iterator[WeightCopy]:
    """Yields the copies cut along their first axis, so that a buffer holds any of them."""
    for copy in copies:
        row_bytes = copy.source[0].nbytes
        num_rows = max(chunk_bytes // row_bytes, 1)
        sources, places = torch.split(copy.source, num_rows), torch.split(copy.place, num_rows)
        yield from map(WeightCopy, sources, places)


class _HostLane:
    """Copies within the host's memory."""

    def copy(self, part: WeightCopy) -> int:
        """Returns the bytes written."""
        part.place.copy_(part.source)
        return part.place.nbytes

    def finish(self) -> None:
        """Nothing is under way."""


class _Buffer:
    """Pinned memory, and when the copy from it is over."""

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


class _GpuLane(threading.local):
    """The buffers and the stream of one thread; each thread that uses it gets its own."""

    def __init__(self, device: torch.device, chunk_bytes: int) -> None:
        self._device = device
        with torch.cuda.device(device):
            self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
            # The places may be memory that work queued before this still reads.
            self._stream.wait_stream(torch.cuda.default_stream())
            self._buffers = deque((_Buffer(chunk_bytes), _Buffer(chunk_bytes)))

    def copy(self, part: WeightCopy) -> int:
        """Returns the bytes written, which may still be on their way from this thread's buffers."""
        buffer = self._buffers[0]
        self._buffers.rotate()
        with torch.cuda.stream(self._stream):
            part.place.copy_(buffer.filled(part.source), non_blocking=True)
            buffer.is_free.record()
        return part.place.nbytes

    def finish(self) -> None:
        """Waits for everything that any thread has queued."""
        torch.cuda.synchronize(self._device)


@dataclass(frozen=True, slots=True)
class WeightPart:
    """One tensor of a checkpoint and where it goes.

    Attributes:
        key: name in the checkpoint.
        shape: shape it must have there.
        index: of a stack `[E, K, N]` or `[E, N]`, the matrix or vector that is read; matrices are
            transposed, unless `keeps_order`. None reads a tensor that is no such stack.
        target: name of the tensor it becomes; parts of one target are stacked along axis 0.
        repeats: how often it is repeated along axis 0, as a norm shared by all heads is.
        cut: the part that is read; None reads all.
        row_order: rows are put in this order, in every block of as many; None leaves them.
        dtype: of the tensor it becomes; None takes the model's.
        may_stay: a matrix that a checkpoint has in 8 bits may be held so, with its scales, if all
            parts of its target may.
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

    def taken(self, read: Callable[[Cut | None], Tensor]) -> Tensor:
        """Returns what `read`, which may be told a part of the tensor, has for the target."""
        if self.index is None:
            return self._arranged(read(self.cut))
        own = read(Cut(0, self.index, 1))[0]
        own = own if own.dim() == 1 or self.keeps_order else own.T
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

    @property
    def source_rows(self) -> Tensor:
        """The row of the checkpoint's matrix that each row becomes."""
        rows = torch.arange(self.shape[0])
        is_cut = self.cut is not None and self.cut.dim == 0
        return self._arranged(cut_tensor(rows, self.cut) if is_cut else rows)

    @property
    def columns(self) -> Cut | None:
        return self.cut if self.cut is not None and self.cut.dim == 1 else None


class WeightTensors(dict[str, Tensor]):
    """Tensors by the targets of their parts, which loaders take out.

    Attributes:
        dtype: of the model.
        layouts: of the matrices that are held in 8 bits; see `scales_of` for their scales.
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
        """Takes a matrix out of the dict, with its scales if it has some."""
        weight, scales = self.pop(name), self.pop(scales_of(name), None)
        return weight if scales is None else StoredMatrix(weight, scales, self.dtype)


def scales_of(target: str) -> str:
    """Returns the name that the scales of a target have."""
    return f"{target}.scales"


Stays = Callable[[str, StoredLayout], bool]
"""Whether a target that can be held in a layout is to be."""


def stays_stored(quantisation: Quantisation, dtype: torch.dtype, device: torch.device) -> Stays:
    """Returns the rule for a model in `dtype` on `device`: matrices that come in the 8 bits that
    are asked for stay as they are, or in any where the device multiplies them."""
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
    pace: CopyPace = AT_ONCE,
    is_pinned: bool = False,
    show_progress: bool = False,
) -> WeightTensors:
    """Reads all parts to `device`, cast to `dtype`, stacked into their targets.

    Args:
        stays: which matrices that the checkpoint has in 8 bits are held so; None holds none.
        is_pinned: see `empty_targets`.

    Raises:
        CheckpointError: for missing or unexpected keys, a wrong shape or a damaged file.
    """
    _check_keys(checkpoint, parts, tuple(ignored_prefixes), tuple(ignored_suffixes), ignored_keys)
    files = {path: checkpoint.open_file(path) for path in _by_file(checkpoint, parts)}
    layouts: dict[str, StoredLayout] = {}
    if stays is not None:
        found = _stored_layouts(checkpoint, files, parts)
        layouts = {target: layout for target, layout in found.items() if stays(target, layout)}
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
                yield WeightCopy(part.taken(partial(weights.read, part.key)), place)
                continue
            numbers = part.taken(partial(_codes, weights, part.key))
            yield WeightCopy(numbers, place.view(torch.uint8))
            yield WeightCopy(_own_scales(weights, part, layout, checkpoint), scale_places[index])


def _codes(weights: ScaledFile, key: str, cut: Cut | None) -> Tensor:
    """Returns 8-bit numbers as bytes, which torch indexes whatever they stand for."""
    return weights.read_stored(key, cut).view(torch.uint8)


def _stored_layouts(
    checkpoint: Checkpoint, files: Mapping[Path, ScaledFile], parts: Sequence[WeightPart]
) -> dict[str, StoredLayout]:
    """Returns the targets that can be held in 8 bits."""
    by_target: dict[str, list[WeightPart]] = defaultdict(list)
    for part in parts:
        by_target[part.target].append(part)
    found = {}
    for target, own in by_target.items():
        if not all(part.may_stay and part.key in checkpoint.scales for part in own):
            continue
        dtypes = {files[checkpoint.files[part.key]].stored_dtype(part.key) for part in own}
        dtype = dtypes.pop()
        layout = None if dtypes or dtype is None else layout_of(own, dtype, checkpoint.block)
        if layout is not None:
            found[target] = layout
    return found


def layout_of(
    parts: Sequence[WeightPart], dtype: torch.dtype, block: ScaleBlock | None
) -> StoredLayout | None:
    """Returns how a target is held whose parts a checkpoint has in 8 bits; None if it is not.

    Args:
        block: see `Checkpoint`.
    """
    depth = parts[0].read_shape[1]
    if block is None:
        return StoredLayout(dtype, depth, None)
    # Equal cuts of a group all begin with a block where one is whole blocks long.
    cuts = [part.columns for part in parts if part.columns is not None]
    if any(cut.start % block.columns or cut.length % block.columns for cut in cuts):
        return None
    is_aligned = all(_is_aligned(part, block.rows, is_last=part is parts[-1]) for part in parts)
    held = block_held(block, is_aligned=is_aligned)
    return None if held is None else StoredLayout(dtype, depth, held)


def _is_aligned(part: WeightPart, num_rows: int, *, is_last: bool) -> bool:
    """Whether each block of rows of a target comes from one of the checkpoint."""
    if part.num_rows % num_rows and not is_last:
        return False
    if part.row_order is None:
        return part.cut is None or part.cut.dim == 1 or part.cut.start % num_rows == 0
    blocks = part.source_rows // num_rows
    firsts = torch.arange(len(blocks)) // num_rows * num_rows
    return torch.equal(blocks, blocks[firsts])


def _own_scales(
    weights: ScaledFile, part: WeightPart, layout: StoredLayout, checkpoint: Checkpoint
) -> Tensor:
    """Returns the scales of what is read of a matrix, as they are held."""
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
    """Returns the first names in words, and how many more there are."""
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
    """Returns the tensors that `parts` become, not filled.

    Args:
        layouts: of targets that are held in 8 bits.
        is_pinned: in memory of the host that a GPU reads at the full speed of its link. torch keeps
            such memory when it comes free, so that the next such tensors cost nothing.
    """
    num_rows: dict[str, int] = defaultdict(int)
    trailing = {part.target: part.read_shape[1:] for part in parts}
    dtypes = {part.target: part.dtype or dtype for part in parts}
    for part in parts:
        num_rows[part.target] += part.num_rows
    own = {target: layout for target, layout in layouts.items() if target in num_rows}
    dtypes |= {target: layout.dtype for target, layout in own.items()}
    shapes = {target: (rows, *trailing[target]) for target, rows in num_rows.items()}
    for target, layout in own.items():
        shapes[scales_of(target)] = -(-num_rows[target] // layout.step), layout.num_columns
        dtypes[scales_of(target)] = torch.float32
    tensors = {
        name: torch.empty(shape, dtype=dtypes[name], device=device, pin_memory=is_pinned)
        for name, shape in shapes.items()
    }
    return WeightTensors(tensors, dtype, own)


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
    """Returns, for each part that is held in 8 bits, the view of the scales that it fills."""
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
