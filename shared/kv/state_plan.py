"""The plan of recurrent states in one forward: made on the host, read by kernels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from shared.kernels.delta_layer import NOWHERE, DeltaLanes, DeltaPrompts
from shared.kernels.delta_rule import CHUNK
from shared.kv.batch import ForwardBatch
from shared.kv.upload import Array, UploadBlock, downloaded, uploaded

# The longest chain of candidates. More causal rows are part of a prompt, and all are committed.
_MAX_CHAIN_ROWS = 64
# More tokens than a round commits, a chain and its bonus token: those must be computed with the
# same bits as plain steps.
_MIN_PROMPT_TOKENS = _MAX_CHAIN_ROWS + 2
_LANE_COLUMNS, _PLACE_COLUMNS = 4, 2


@dataclass(frozen=True, slots=True)
class StateInputs:
    """The plan of one forward on the device; all layers read the same tensors.

    Attributes:
        stamps: `[T]` int64, one for each row of the forward.
        sequences: lanes that advance a sequence's state by few tokens and may write a checkpoint.
        candidates: lanes of candidate rows, which may be rejected; they write no checkpoint.
        prompts: lanes that advance a sequence's state by many tokens; None in a graph, which has
            no prompts.
    """

    stamps: Tensor
    sequences: DeltaLanes
    candidates: DeltaLanes
    prompts: DeltaPrompts | None

    @classmethod
    def of(
        cls, tensors: Sequence[Tensor], places: Tensor, prompts: DeltaPrompts | None = None
    ) -> StateInputs:
        """Wraps the tensors of `StatePlan.fixed` and of `StatePlan.places`."""
        stamps, counts, *tables = tensors
        sequences, candidates = (
            DeltaLanes(table, counts[number : number + 1], places)
            for number, table in enumerate(tables)
        )
        return cls(stamps, sequences, candidates, prompts)

    def first(self, num_rows: int, num_sequences: int, *, has_tail: bool) -> StateInputs:
        """Returns the inputs of a smaller graph, see `GraphInputs`."""
        # Without a tree all candidates are chains, of at least two rows each.
        num_candidates = num_rows if has_tail else num_rows // 2
        return StateInputs(
            self.stamps[:num_rows],
            _first_lanes(self.sequences, num_sequences),
            _first_lanes(self.candidates, num_candidates),
            prompts=None,
        )


@dataclass(frozen=True, slots=True, eq=False)
class StatePlan:
    """`StateInputs` in host memory, and the checkpoints that the forward writes.

    Attributes:
        stamps: `[T]`.
        sequences: `[N, 4]`, and candidates: `[M, 4]`, see `DeltaLanes.table`.
        prompts: `[Q, 4]`, and chunks: `[C, 2]`, see `DeltaPrompts`.
        places: `[P, 2]`, see `DeltaLanes`.
        kept: `[K]`, the checkpoints that are written.
        lengths: `[K]`, tokens that each written checkpoint covers.
        ends: `[K]`, the stamp of the last of those tokens.
    """

    stamps: Array
    sequences: Array
    candidates: Array
    prompts: Array
    chunks: Array
    places: Array
    kept: Array
    lengths: Array
    ends: Array

    @property
    def fixed(self) -> list[Array]:

        counts = np.array([len(self.sequences), len(self.candidates)], np.int64)
        return [self.stamps, counts, self.sequences, self.candidates]

    def upload(self, device: torch.device) -> StateInputs:
        """Returns the inputs on the device. Does not wait for it."""
        arrays = [*self.fixed, self.prompts, self.chunks, self.places]
        *fixed, table, chunks, places = uploaded(arrays, device)
        prompts = DeltaPrompts(table, chunks, places) if len(table) else None
        return StateInputs.of(fixed, places, prompts)


class StateSlots:
    """Inputs at fixed addresses, as a CUDA graph needs them; at first without lanes.

    Attributes:
        inputs: the inputs of the largest graph.
    """

    def __init__(
        self, num_rows: int, num_sequences: int, num_places: int, device: torch.device
    ) -> None:
        self._empty = [
            np.zeros(num_rows, np.int64),
            np.zeros(2, np.int64),
            np.zeros((num_sequences, _LANE_COLUMNS), np.int64),
            np.zeros((num_rows, _LANE_COLUMNS), np.int64),
        ]
        places = np.zeros((num_places, _PLACE_COLUMNS), np.int64)
        self._block = UploadBlock(self._empty, places, device)
        self.inputs = StateInputs.of(self._block.tensors, self._block.fill(self._empty, places))

    def fits(self, plan: StatePlan) -> bool:
        """Whether the plan has no prompts, and few enough places. Lanes fit: there are no more of
        them than rows."""
        return not len(plan.prompts) and len(plan.places) <= len(self.inputs.sequences.places)

    def fill(self, plan: StatePlan) -> None:
        """Queues the copy of a plan that fits; rows that it does not use get the stamp 0."""
        padded = [
            np.concatenate((used, empty[len(used) :]))
            for used, empty in zip(plan.fixed, self._empty, strict=True)
        ]
        self._block.fill(padded, plan.places)

    def clear(self) -> None:
        """Queues the copy of a plan without lanes."""
        self._block.fill(self._empty, np.zeros((0, _PLACE_COLUMNS), np.int64))


@dataclass(frozen=True, slots=True, eq=False)
class HostBatch:
    """A batch in host memory; arrays are `[B]`, one element for each sequence, unless said.

    Attributes:
        slots: `[T]`, slots of the rows.
        row_starts: index of the first row among the T rows.
        counts: number of rows.
        first: logical index of the first row.
        prefixes: number of tokens that all rows see.
        tables: `[B, P]`, the page table.
        mask: `[T, W]`, the tail mask; None where all rows are causal.
    """

    slots: Array
    row_starts: Array
    counts: Array
    first: Array
    prefixes: Array
    is_causal: Array
    tables: Array
    mask: Array | None
    page_size: int

    @classmethod
    def of(cls, batch: ForwardBatch) -> HostBatch:
        """Waits for the device."""
        slots, starts, lengths, prefixes, is_causal, tables, *mask = downloaded(
            [
                batch.slots,
                batch.query_starts,
                batch.kv_lengths,
                batch.prefix_lengths,
                batch.is_causal,
                batch.page_table,
                *([] if batch.tail_mask is None else [batch.tail_mask]),
            ]
        )
        starts = starts.astype(np.int64)
        counts = np.diff(starts)
        return cls(
            slots=slots,
            row_starts=starts[:-1],
            counts=counts,
            first=lengths - counts,
            prefixes=prefixes.astype(np.int64),
            is_causal=is_causal,
            tables=tables.astype(np.int64),
            mask=mask[0] if mask else None,
            page_size=batch.page_size,
        )

    @classmethod
    def of_prefixes(
        cls, prefixes: Sequence[tuple[Sequence[int], int]], page_size: int
    ) -> HostBatch:
        """Returns a batch without rows, of sequences whose tokens are all computed.

        Args:
            prefixes: pages and number of tokens of each sequence.
        """
        count = len(prefixes)
        tables = np.zeros((count, max(len(pages) for pages, _ in prefixes)), np.int64)
        for row, (pages, _) in zip(tables, prefixes, strict=True):
            row[: len(pages)] = pages
        lengths = np.array([length for _, length in prefixes], np.int64)
        nothing = np.zeros(count, np.int64)
        return cls(
            slots=np.zeros(0, np.int64),
            row_starts=nothing,
            counts=nothing,
            first=lengths,
            prefixes=lengths,
            is_causal=np.ones(count, np.bool_),
            tables=tables,
            mask=None,
            page_size=page_size,
        )

    @property
    def is_real(self) -> Array:
        """Whether the sequence is real; padding sequences have their tokens in the padding page."""
        real: Array = self.tables[:, 0] != 0
        return real

    @property
    def start(self) -> Array:
        """Number of tokens before the forward's rows, all of them committed."""
        return np.where(self.is_causal, self.first, self.prefixes)

    @property
    def keeps_rows(self) -> Array:
        """Whether all rows are committed, most likely: one row is the last committed token, and
        many rows, or the first ones of a sequence, are a prompt."""
        is_chain = (self.start > 0) & (self.counts > 1) & (self.counts <= _MAX_CHAIN_ROWS)
        keeps_rows: Array = self.is_causal & ~is_chain
        return keeps_rows

    @property
    def end(self) -> Array:
        """Number of tokens that the sequence's new checkpoint covers."""
        return np.where(self.keeps_rows, self.first + self.counts, self.start)

    def slots_of(self, owners: Array, indices: Array) -> Array:
        """Returns the slots of logical indices of sequences; `NOWHERE` of negative ones."""
        pages = self.tables[owners, np.maximum(indices, 0) // self.page_size]
        return np.where(indices < 0, NOWHERE, pages * self.page_size + indices % self.page_size)


def sequence_lanes(
    batch: HostBatch, sources: Array, lengths: Array, targets: Array, history: int
) -> tuple[Array, Array, Array, Array]:
    """Returns the lanes from old checkpoints to new ones: the table of those of few tokens, the
    table and chunks of those of many tokens (see `DeltaPrompts`), and the places of all.

    Args:
        sources: `[B]`, the checkpoint that each sequence starts from.
        lengths: `[B]`, tokens that this checkpoint covers.
        targets: `[B]`, the checkpoint that each sequence writes; `NOWHERE` for none.
        history: earlier tokens that the convolution window of a token sees.
    """
    is_kept, is_wanted = targets != NOWHERE, batch.keeps_rows & (batch.counts > 0)
    moves = (batch.end > lengths) | (sources != targets)
    [owners] = np.nonzero(np.where(is_kept, moves, is_wanted))
    lanes, indices = _spans(lengths[owners] - history, batch.end[owners])
    rows = _rows(batch, owners[lanes], indices)
    rows[~batch.keeps_rows[owners[lanes]]] = NOWHERE
    slots = batch.slots_of(owners[lanes], indices)
    table = _table(sources[owners], targets[owners], lanes, history)
    is_long = table[:, 3] >= _MIN_PROMPT_TOKENS
    prompts, chunks = _chunked(table[is_long], lengths[owners[is_long]])
    return table[~is_long], prompts, chunks, np.stack((slots, rows), 1)


def candidate_lanes(
    batch: HostBatch, sources: Array, lengths: Array, targets: Array, history: int
) -> tuple[Array, Array]:
    """Returns the table and the places of lanes of candidate rows: one for a chain, one for the
    path to each leaf of a tree. They start from the sequence's new checkpoint, or else its old one.

    Args: those of `sequence_lanes`.
    """
    is_kept = targets != NOWHERE
    [chains] = np.nonzero(batch.is_causal & ~batch.keeps_rows)
    lanes, indices = _spans(batch.start[chains], batch.start[chains] + batch.counts[chains])
    leaf_owners, leaves, path_indices = _paths(batch)
    owners = np.concatenate((chains, leaf_owners))
    base = np.where(is_kept, batch.start, lengths)[owners]
    before, before_indices = _spans(base - history, batch.start[owners])
    lanes = np.concatenate((before, lanes, leaves + len(chains)))
    indices = np.concatenate((before_indices, indices, path_indices))
    order = np.argsort(lanes, kind="stable")
    lanes, indices = lanes[order], indices[order]
    slots, rows = batch.slots_of(owners[lanes], indices), _rows(batch, owners[lanes], indices)
    # Paths share nodes: only the first path with a node writes that node's row.
    is_first = np.zeros(len(rows), np.bool_)
    is_first[np.unique(rows, return_index=True)[1]] = True
    rows[~is_first] = NOWHERE
    own_sources = np.where(is_kept, targets, sources)[owners]
    table = _table(own_sources, np.full(len(owners), NOWHERE), lanes, history)
    return table, np.stack((slots, rows), 1)


def _paths(batch: HostBatch) -> tuple[Array, Array, Array]:
    """Returns the sequence of each leaf, `[N]`, and for each node of all paths, leaf by leaf, its
    leaf and its logical index."""
    owners = np.repeat(np.arange(len(batch.counts)), batch.counts)
    [tree_rows] = np.nonzero(~batch.is_causal[owners])
    if not len(tree_rows):
        return tree_rows, tree_rows, tree_rows
    assert batch.mask is not None, "rows that are not causal have a mask"
    owners = owners[tree_rows]
    # Columns of the mask: of the sequence's first row, and of each row itself.
    first = (batch.first - batch.prefixes)[owners]
    own = tree_rows - batch.row_starts[owners] + first
    paths = batch.mask[tree_rows] & (np.arange(batch.mask.shape[1]) < own[:, None])
    lines, columns = np.nonzero(paths)
    is_row = columns >= first[lines]
    is_leaf = np.ones(len(batch.slots), np.bool_)
    is_leaf[(batch.row_starts[owners] - first)[lines][is_row] + columns[is_row]] = False
    is_leaf = is_leaf[tree_rows]
    owners, own, paths = owners[is_leaf], own[is_leaf], paths[is_leaf]
    paths[np.arange(len(own)), own] = True
    leaves, columns = np.nonzero(paths)
    return owners, leaves, columns + batch.prefixes[owners[leaves]]


def _rows(batch: HostBatch, owners: Array, indices: Array) -> Array:
    """Returns the forward's rows at logical indices; `NOWHERE` before the first row."""
    rows = indices - batch.first[owners]
    return np.where(rows < 0, NOWHERE, rows + batch.row_starts[owners])


def _spans(begins: Array, ends: Array) -> tuple[Array, Array]:
    """Joins the ranges `[begin, end)`; returns each element's range index and number."""
    counts = ends - begins
    numbers = np.repeat(np.arange(len(counts)), counts)
    firsts = np.cumsum(counts) - counts
    return numbers, np.arange(len(numbers)) + np.repeat(begins - firsts, counts)


def _table(sources: Array, targets: Array, lanes: Array, history: int) -> Array:
    """Returns the table of lanes; `lanes` holds the lane of each place, in ascending order."""
    counts = np.bincount(lanes, minlength=len(sources))
    firsts = np.cumsum(counts) - counts
    return np.stack((sources, targets, firsts, counts - history), 1).astype(np.int64)


def _chunked(table: Array, begins: Array) -> tuple[Array, Array]:
    """Returns the table and the chunks of prompt lanes, see `DeltaPrompts`.

    Chunks end where the sequence has a multiple of `CHUNK` tokens, so that a prompt that is
    computed in several forwards can have the same chunks as in one.

    Args:
        begins: tokens of its sequence before each lane's first token.
    """
    ends = begins + table[:, 3]
    lanes, numbers = _spans(begins // CHUNK, -(-ends // CHUNK))
    firsts = np.maximum(numbers * CHUNK, begins[lanes])
    sizes = np.minimum((numbers + 1) * CHUNK, ends[lanes]) - firsts
    counts = np.bincount(lanes, minlength=len(table))
    prompts = np.stack((table[:, 0], table[:, 1], np.cumsum(counts) - counts, counts), 1)
    return prompts, np.stack((table[lanes, 2] + firsts - begins[lanes], sizes), 1)


def _first_lanes(lanes: DeltaLanes, count: int) -> DeltaLanes:
    return DeltaLanes(lanes.table[:count], lanes.count, lanes.places)
