"""Storage of the paged KV cache: one key and one value tensor for all layers, addressed by slot."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from shared.kernels.cache import CacheScales, store
from shared.kernels.delta_layer import STAMP_SIZE
from shared.kv.batch import ForwardBatch
from shared.kv.leases import PADDING_PAGE
from shared.kv.state_plan import HostBatch, StatePlan
from shared.kv.states import StateLayout, StateStore
from shared.kv.upload import Array

NUM_STATES = 32
"""Checkpoints of recurrent states, unless told otherwise."""


@dataclass(frozen=True, slots=True)
class KvLayout:
    """Shape of the KV cache of one decoder.

    Attributes:
        page_size: tokens a page.
        dtype: dtype of keys and values.
        has_values: values are stored beside keys; else they are the first part of the keys.
        num_layers: those of the cache: a layer with a state takes several, for its rows.
        states: of layers with recurrent states; None in most decoders.
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    page_size: int
    dtype: torch.dtype
    has_values: bool = True
    states: StateLayout | None = None

    @property
    def num_planes(self) -> int:
        """Tensors a layer: keys, and values if they are stored."""
        return 2 if self.has_values else 1

    @property
    def is_e4m3(self) -> bool:
        """Whether keys and values take 8 bits, with factors; see `CacheScales`."""
        return self.dtype is torch.float8_e4m3fn

    @property
    def token_size_bytes(self) -> int:
        """Bytes of one token's keys and values over all layers."""
        elements = self.num_planes * self.num_layers * self.num_kv_heads * self.head_dim
        return elements * self.dtype.itemsize

    @property
    def page_size_bytes(self) -> int:
        """Bytes of one page's keys and values over all layers."""
        return self.token_size_bytes * self.page_size


@dataclass(frozen=True, slots=True)
class OwnRows:
    """The rows of a forward of T that one rank attends from.

    Attributes:
        batch: those, with pages and slots of the rank's pool.
        places: `[R]` int64, theirs among the T; None where they are all of them.
        num_rows: T.
    """

    batch: ForwardBatch
    places: Tensor | None
    num_rows: int

    def taken(self, rows: Tensor) -> Tensor:
        """Returns `[R, …]` of `[T, …]`."""
        return rows if self.places is None else rows.index_select(0, self.places)

    def placed(self, results: Tensor) -> Tensor:
        """Returns `[T, …]` of `[R, …]`, zeros where another rank has the row."""
        if self.places is None:
            return results
        whole = results.new_zeros((self.num_rows, *results.shape[1:]))
        return whole.index_copy_(0, self.places, results)


class KvPool:
    """Keys and values of all pages; slot = page * page_size + offset.

    Page 0 is never given to a sequence: it backs the padding of page tables and of fixed-size
    batches. Memory starts as zeros because masked slots are multiplied by zero, not skipped, and
    zero times an uninitialised NaN is NaN.

    Processes that attend from sequences of their own have a pool each, one of `num_ranks`. Leases
    count pages through all of them: those of rank r are `[r * num_pages, (r + 1) * num_pages)`,
    the first of which is its padding. Batches name pages as leases do, see `own`.

    Args:
        scales: `[2, num_layers, num_kv_heads]` float32 of an e4m3 cache, keys first; see
            `CacheScales`. Of any other cache None.
        num_states: checkpoints of recurrent states, where the layout has some.
        rank, num_ranks: which of how many pools.

    Attributes:
        num_pages: of this pool, the padding page included.
        storage: `[num_planes, num_layers, num_pages * page_size, num_kv_heads, head_dim]`, keys
            first.
        keys: one `[num_pages * page_size, num_kv_heads, head_dim]` tensor a layer.
        values: likewise; the keys themselves where the layout has no values.
        states: see `StateStore`; None where the layout has none.
    """

    def __init__(
        self,
        layout: KvLayout,
        num_pages: int,
        device: torch.device,
        scales: Tensor | None = None,
        *,
        num_states: int = NUM_STATES,
        rank: int = 0,
        num_ranks: int = 1,
    ) -> None:
        assert (scales is not None) == layout.is_e4m3, "an e4m3 cache, and no other, has factors"
        assert num_pages >= 2, f"{num_pages} pages: page 0 is padding, so at least 2 are needed"
        shape = (
            layout.num_planes,
            layout.num_layers,
            num_pages * layout.page_size,
            layout.num_kv_heads,
            layout.head_dim,
        )
        self.layout = layout
        self.num_pages = num_pages
        self.num_ranks = num_ranks
        self._rank = rank
        self.device = device
        self.storage = torch.zeros(shape, dtype=layout.dtype, device=device)
        self.keys: tuple[Tensor, ...] = self.storage[0].unbind()
        self.values: tuple[Tensor, ...] = self.storage[-1].unbind()
        self.states = (
            None if layout.states is None else StateStore(layout.states, num_states, device)
        )
        self._scales = (
            None
            if scales is None
            else tuple(map(CacheScales, scales[0].unbind(), scales[1].unbind()))
        )

    @property
    def page_size(self) -> int:
        return self.layout.page_size

    @property
    def num_leased_pages(self) -> int:
        """Pages of all ranks, padding included: as many as leases count."""
        return self.num_ranks * self.num_pages

    def own(self, batch: ForwardBatch) -> OwnRows:
        """Returns the rows that this rank attends from.

        Where the host does not know which those are, they are all of them, and sequences of other
        ranks see no key and write to the padding page: computed on the device, with fixed shapes.
        Waits for nothing.
        """
        num_rows = len(batch.token_ids)
        if self.num_ranks == 1:
            return OwnRows(batch, None, num_rows)
        kept = [
            index
            for index, each in enumerate(batch.extents)
            if each.first_page // self.num_pages == self._rank
        ]
        if not kept and batch.extents:
            # Of another rank's, the shortest: forwards of no rows are none.
            kept = [min(range(len(batch.extents)), key=lambda i: batch.extents[i].num_rows)]
        if len(kept) == len(batch.extents):
            return OwnRows(self._translated(batch), None, num_rows)
        some, places = batch.of_sequences(kept)
        return OwnRows(self._translated(some), places, num_rows)

    def _translated(self, batch: ForwardBatch) -> ForwardBatch:
        table = self._own(batch.page_table, 1)
        # A sequence has its pages in one pool.
        is_own = table[:, 0] > PADDING_PAGE
        return replace(
            batch,
            slots=self.own_slots(batch.slots),
            kv_lengths=batch.kv_lengths * is_own,
            prefix_lengths=batch.prefix_lengths * is_own,
            page_table=table,
            # Of no keys, causal rows see none; a tree's mask would still count some.
            is_causal=batch.is_causal | ~is_own,
        )

    def own_slots(self, slots: Tensor) -> Tensor:
        """Returns where this pool has the tokens of `slots`, in the padding page for those of
        other ranks."""
        return slots if self.num_ranks == 1 else self._own(slots, self.page_size)

    def _own(self, places: Tensor, num_each: int) -> Tensor:
        """Returns places counted from this pool's first on, 0 for those outside of it.

        Args:
            num_each: places in a page.
        """
        own = places - self._rank * self.num_pages * num_each
        return own.masked_fill_((own < 0) | (own >= self.num_pages * num_each), 0)

    def scales(self, layer: int) -> CacheScales | None:
        """Returns the factors of one layer; None unless the cache is e4m3."""
        return None if self._scales is None else self._scales[layer]

    def write(self, layer: int, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        """Stores `keys` and `values` `[T, num_kv_heads, head_dim]` at `slots` `[T]` int64."""
        scales = self.scales(layer)
        store(self.keys[layer], slots, keys, None if scales is None else scales.keys)
        store(self.values[layer], slots, values, None if scales is None else scales.values)

    def state_rows(self, first_layer: int) -> Tensor:
        """Returns the rows of a layer with a state, over as many of the cache's layers as they
        take, from `first_layer` on; see `delta_layer`."""
        assert self.layout.states is not None
        return self.storage[:, first_layer : first_layer + self.layout.states.layers_each]

    @contextmanager
    def advancing(self, batch: ForwardBatch) -> Iterator[StatePlan | None]:
        """Plans what the forward of a batch, which is the body, does with states; None where there
        are none. Its checkpoints are entered at the end, unless it fails."""
        plan = None if self.states is None else self.states.plan(batch, self.read_stamps)
        yield plan
        if self.states is not None and plan is not None:
            self.states.keep(plan)

    def lend_states(self, prefixes: Sequence[tuple[Sequence[int], int]]) -> tuple[StatePlan, Array]:
        """See `StateStore.lend`.

        Args:
            prefixes: pages and tokens of each sequence, one token at least.
        """
        assert self.states is not None
        return self.states.lend(HostBatch.of_prefixes(prefixes, self.page_size), self.read_stamps)

    def read_stamps(self, slots: Tensor) -> Tensor:
        """Returns the stamps of rows, `[N, STAMP_SIZE]` int64; a row begins with its own."""
        assert self.layout.states is not None
        first = self.storage[0, self.layout.states.first_layer].flatten(1)
        return first[:, :STAMP_SIZE].index_select(0, slots).to(torch.int64)

    def move(self, source_slots: Tensor, target_slots: Tensor) -> None:
        """Copies tokens between slots in every layer, as if all were read before any is written.

        Both are `[N]` int64, as leases count, and may overlap; targets are distinct. Compacts the
        accepted path of a tree to the front of its tail. Costs a copy of the N tokens.
        """
        source_slots, target_slots = self.own_slots(source_slots), self.own_slots(target_slots)
        # torch copies no e4m3 by index.
        storage = self.storage.view(torch.uint8) if self.layout.is_e4m3 else self.storage
        storage.index_copy_(2, target_slots, storage.index_select(2, source_slots))
