"""Graphs by what tells them apart, as many of them as there is memory for."""

from __future__ import annotations

import gc
import logging
import threading
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch

from shared.kv.batch import ForwardBatch
from shared.runtime.graph_inputs import GraphLimits
from shared.runtime.memory import Shortage

# torch captures on one stream of the process, whichever thread asks.
_ONE_AT_A_TIME = threading.Lock()


@contextmanager
def capturing(
    graph: torch.cuda.CUDAGraph, pool: Any, stream: torch.cuda.Stream | None = None
) -> Iterator[None]:
    """Captures into `graph` what its body queues.

    Another thread of the process may use the device meanwhile, and waits to capture. It must not
    wait for the whole device, which breaks the capture under way; this waits for it before it
    begins. No garbage is collected: a graph among it would be destroyed, which breaks it, too.

    Args:
        pool: of `torch.cuda.graph_pool_handle`.
        stream: on which the graph will run while others run elsewhere: libraries keep a workspace
            for each stream that captures. None is the one of all other captures.
    """
    with _ONE_AT_A_TIME:
        collects = gc.isenabled()
        gc.disable()
        # torch leaves the thread on the stream of captures when one cannot end.
        own_stream = torch.cuda.stream(torch.cuda.current_stream())
        try:
            with (
                own_stream,
                torch.cuda.graph(
                    graph, pool=pool, stream=stream, capture_error_mode="thread_local"
                ),
            ):
                yield
        finally:
            if collects:
                gc.enable()


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


logger = logging.getLogger(__name__)
Key = TypeVar("Key", bound=Hashable)
Graph = TypeVar("Graph")


class GraphStore(Generic[Key, Graph]):
    """Captures a graph when it is first asked for.

    Args:
        capture: makes one.
        is_shared: other processes capture the same one at the same time, and wait for this one in
            the middle of it.
        advise: says what to change for so much memory.

    Attributes:
        is_full: no memory is left for another one; those that are here go on.
    """

    def __init__(
        self,
        capture: Callable[[Key], Graph],
        *,
        is_shared: bool,
        advise: Callable[[Shortage], str],
    ) -> None:
        self.is_full = False
        self._capture = capture
        self._is_shared = is_shared
        self._advise = advise
        self._graphs: dict[Key, Graph] = {}

    def __len__(self) -> int:
        return len(self._graphs)

    def __contains__(self, key: Key) -> bool:
        return key in self._graphs

    def __iter__(self) -> Iterator[Key]:
        return iter(self._graphs)

    def of(self, key: Key) -> Graph | None:
        """Returns a graph; None where there is no memory for it.

        Raises:
            RuntimeError: there is none, and others share the graph: going on without it
                would leave them waiting for ever.
        """
        if key not in self._graphs and not self.is_full:
            try:
                self._graphs[key] = self._capture(key)
            except RuntimeError as error:
                advice = self._advise(Shortage.of(error))
                if self._is_shared:
                    logger.critical(
                        "no memory for CUDA graph %d of the group: %s", len(self) + 1, advice
                    )
                    raise
                self._fill_up(advice)
        return self._graphs.get(key)

    def _fill_up(self, advice: str) -> None:
        self.is_full = True
        torch.cuda.empty_cache()
        logger.warning(
            "no memory for more than %d CUDA graphs; other steps run without: %s",
            *(len(self), advice),
        )
