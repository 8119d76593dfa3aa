"""Keys of the CUDA graphs of forwards, and the list of graphs to capture."""

from __future__ import annotations

from dataclasses import dataclass

from shared.kv.batch import ForwardBatch
from shared.runtime.graph_inputs import GraphLimits

# Each size costs its captures at start; between two sizes padding costs little, because small
# products are bound by their weights.
_ROW_BUCKETS = (1, 2, 4, 8, 12, 16, 24, 32, 40, 48, 64, 80, 96, 128, 160, 192, 224, 256, 320, 512)
# A graph has blocks of attention for as many sequences as may come. Trees mostly have this many
# rows, and room for a sequence a row would make the launcher take them for a full device.
_ROWS_A_TREE = 4
_FEWEST_ROWS_OF_TREES = 24


@dataclass(frozen=True, slots=True)
class GraphKey:
    """The properties by which a graph is chosen.

    Attributes:
        num_rows: rows of the bucket.
        num_sequences: that these rows may fall to.
        has_tail: whether some sequence may be a tree.
        capture_layers: layers whose input the forward returns.
    """

    num_rows: int
    num_sequences: int
    has_tail: bool
    capture_layers: tuple[int, ...]


def sequence_buckets(num_rows: int, max_sequences: int, *, has_tail: bool) -> tuple[int, ...]:
    """Returns the numbers of sequences that graphs of so many rows are captured for, ascending."""
    most, few = min(num_rows, max_sequences), num_rows // _ROWS_A_TREE
    has_trees = has_tail and num_rows >= _FEWEST_ROWS_OF_TREES
    return (few, most) if has_trees and few < most else (most,)


def row_buckets(max_rows: int) -> tuple[int, ...]:
    """Returns the numbers of rows that graphs are captured for, ascending, `max_rows` last."""
    return (*(rows for rows in _ROW_BUCKETS if rows < max_rows), max_rows)


def keys_of(limits: GraphLimits, capture_layers: tuple[int, ...]) -> list[GraphKey]:
    """Returns all graphs for one kind of features, ascending."""
    most_plain = _bucket_of(limits.max_sequences, limits)
    return [
        GraphKey(num_rows, num_sequences, has_tail, capture_layers)
        for num_rows in row_buckets(limits.max_rows)
        for has_tail in (False, True)
        if has_tail or num_rows <= most_plain
        for num_sequences in sequence_buckets(num_rows, limits.max_sequences, has_tail=has_tail)
    ]


def key_of(batch: ForwardBatch, limits: GraphLimits, capture_layers: tuple[int, ...]) -> GraphKey:
    """Returns the smallest graph for a batch within the limits."""
    num_rows, has_tail = _bucket_of(len(batch.token_ids), limits), batch.tail_mask is not None
    buckets = sequence_buckets(num_rows, limits.max_sequences, has_tail=has_tail)
    num_sequences = next(count for count in buckets if count >= len(batch.kv_lengths))
    return GraphKey(num_rows, num_sequences, has_tail, capture_layers)


def _bucket_of(num_rows: int, limits: GraphLimits) -> int:
    return next(rows for rows in row_buckets(limits.max_rows) if rows >= num_rows)
