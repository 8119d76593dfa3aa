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
"""Default number of checkpoints of recurrent states."""


@dataclass(frozen=True, slots=True)
class KvLayout:
    """Shape of the KV cache of one decoder.

    Attributes:
        num_layers: layers of the cache; a decoder layer with a recurrent state takes several, for
            its rows.
        has_values: values are stored in tensors of their own; else they are the first part of the
            keys.
        states: shape of the recurrent states; None in most decoders.
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
        """Tensors per layer: keys, and values if they are stored."""
        return 2 if self.has_values else 1

    @property
    def is_e4m3(self) -> bool:
        """Whether keys and values are stored as e4m3 with scales; see `CacheScales`."""
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
    """The R rows that one rank attends from, of a forward of T rows.

    Attributes:
        batch: the rank's rows, with pages and slots counted in the rank's pool.
        row_indices: `[R]` int64, indices of the rank's rows among the T rows; None where R = T.
        num_rows: T.
    """

    batch: ForwardBatch
    row_indices: Tensor | None
    num_rows: int

    def select(self, rows: Tensor) -> Tensor:
        """Returns the rank's rows `[R, …]` of `[T, …]`."""
        return rows if self.row_indices is None else rows.index_select(0, self.row_indices)

    def scatter(self, results: Tensor) -> Tensor:
        """Returns `[T, …]` of the rank's results `[R, …]`, zeros in the rows of other ranks."""
        if self.row_indices is None:
            return results
        scattered = results.new_zeros((self.num_rows, *results.shape[1:]))
        return scattered.index_copy_(0, self.row_indices, results)


class KvPool:
    """Keys and values of all pages; slot = page * page_size + offset.

    Page 0 is never given to a sequence: it backs the padding of page tables and of fixed-size
    batches. Memory starts as zeros because masked slots are multiplied by zero, not skipped, and
    zero times an uninitialised NaN is NaN.

    With data-parallel attention, each of `num_ranks` processes has a pool. Leases number the pages
    of all pools: rank r has `[r * num_pages, (r + 1) * num_pages)`, the first of which is its
    padding page. Batches use the numbers of the leases; `own` converts them to this pool's.

    Args:
        scales: `[2, num_layers, num_kv_heads]` float32 of an e4m3 cache, keys first; see
            `CacheScales`. None for any other cache.
        num_states: checkpoints of recurrent states, if the layout has recurrent states.

    Attributes:
        num_pages: pages of this pool, the padding page included.
        page_size: tokens in a page.
        storage: `[num_planes, num_layers, num_pages * page_size, num_kv_heads, head_dim]`, keys
            first.
        keys: one `[num_pages * page_size, num_kv_heads, head_dim]` tensor per layer.
        values: likewise; the keys themselves where the layout has no values.
        scales: one for each layer; None in it unless the cache is e4m3.
        states: see `StateStore`; None where the layout has no recurrent states.
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
        assert (scales is not None) == layout.is_e4m3, "an e4m3 cache, and no other, has scales"
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
        self.page_size = layout.page_size
        self.num_ranks = num_ranks
        self._rank = rank
        self.device = device
        self.storage = torch.zeros(shape, dtype=layout.dtype, device=device)
        self.keys: tuple[Tensor, ...] = self.storage[0].unbind()
        self.values: tuple[Tensor, ...] = self.storage[-1].unbind()
        self.states = (
            None if layout.states is None else StateStore(layout.states, num_states, device)
        )
        self.scales: tuple[CacheScales | None, ...] = (
            (None,) * layout.num_layers
            if scales is None
            else tuple(map(CacheScales, scales[0].unbind(), scales[1].unbind()))
        )

    @property
    def num_leased_pages(self) -> int:
        """Pages of all ranks, padding pages included: the pages that leases number."""
        return self.num_ranks * self.num_pages

    def own(self, batch: ForwardBatch) -> OwnRows:
        """Returns the rows that this rank attends from. Does not wait for the device.

        A batch without `extents` keeps all rows, with fixed shapes: sequences of other ranks then
        see no key and write to the padding page.
        """
        num_rows = len(batch.token_ids)
        if self.num_ranks == 1:
            return OwnRows(batch, None, num_rows)
        kept = [
            index
            for index, extent in enumerate(batch.extents)
            if extent.first_page // self.num_pages == self._rank
        ]
        if not kept and batch.extents:
            # A forward needs at least one row: take the shortest sequence of another rank.
            kept = [min(range(len(batch.extents)), key=lambda i: batch.extents[i].num_rows)]
        if len(kept) == len(batch.extents):
            return OwnRows(self._localise(batch), None, num_rows)
        own_batch, row_indices = batch.of_sequences(kept)
        return OwnRows(self._localise(own_batch), row_indices, num_rows)

    def _localise(self, batch: ForwardBatch) -> ForwardBatch:
        table = self._local(batch.page_table, 1)
        # All pages of a sequence are in one pool, so its first page tells the rank.
        is_own = table[:, 0] > PADDING_PAGE
        return replace(
            batch,
            slots=self.own_slots(batch.slots),
            kv_lengths=batch.kv_lengths * is_own,
            prefix_lengths=batch.prefix_lengths * is_own,
            page_table=table,
            # With a KV length of 0, causal rows see no key, but a tree's mask would still show
            # some.
            is_causal=batch.is_causal | ~is_own,
        )

    def own_slots(self, slots: Tensor) -> Tensor:
        """Returns `slots` counted in this pool; slots of other ranks become the padding page's."""
        return slots if self.num_ranks == 1 else self._local(slots, self.page_size)

    def _local(self, numbers: Tensor, per_page: int) -> Tensor:
        """Converts page numbers (`per_page` = 1) or slots (`per_page` = page size) of the leases to
        this pool's; those of other pools become 0."""
        local = numbers - self._rank * self.num_pages * per_page
        return local.masked_fill_((local < 0) | (local >= self.num_pages * per_page), 0)

    def write(self, layer: int, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        """Stores `keys` and `values` `[T, num_kv_heads, head_dim]` at `slots` `[T]` int64."""
        scales = self.scales[layer]
        store(self.keys[layer], slots, keys, None if scales is None else scales.keys)
        store(self.values[layer], slots, values, None if scales is None else scales.values)

    def state_rows(self, first_layer: int) -> Tensor:
        """Returns the storage of the rows of one layer with a recurrent state: several layers of
        the cache, from `first_layer` on; see `delta_layer`."""
        assert self.layout.states is not None
        return self.storage[:, first_layer : first_layer + self.layout.states.layers_each]

    @contextmanager
    def advancing(self, batch: ForwardBatch) -> Iterator[StatePlan | None]:
        """Yields the plan of recurrent states for the forward of `batch`, which is the body of the
        `with`; None without states. Enters the written checkpoints unless the body raises."""
        plan = None if self.states is None else self.states.plan(batch, self.read_stamps)
        yield plan
        if self.states is not None and plan is not None:
            self.states.keep(plan)

    def lend_states(self, prefixes: Sequence[tuple[Sequence[int], int]]) -> tuple[StatePlan, Array]:
        """See `StateStore.lend`.

        Args:
            prefixes: pages and number of tokens of each sequence, at least one token.
        """
        assert self.states is not None
        return self.states.lend(HostBatch.of_prefixes(prefixes, self.page_size), self.read_stamps)

    def read_stamps(self, slots: Tensor) -> Tensor:
        """Returns the stamps of rows, `[N, STAMP_SIZE]` int64; each row begins with its stamp."""
        assert self.layout.states is not None
        first = self.storage[0, self.layout.states.first_layer].flatten(1)
        return first[:, :STAMP_SIZE].index_select(0, slots).to(torch.int64)

    def move(self, source_slots: Tensor, target_slots: Tensor) -> None:
        """Copies tokens between slots in every layer, as if all were read before any is written.

        Compacts the accepted path of a tree to the front of its tail. Both arguments are `[N]`
        int64 slots as leases number them. They may overlap; targets are distinct. Costs a copy of
        the N tokens.
        """
        source_slots, target_slots = self.own_slots(source_slots), self.own_slots(target_slots)
        # torch has no index copy for e4m3.
        storage = self.storage.view(torch.uint8) if self.layout.is_e4m3 else self.storage
        storage.index_copy_(2, target_slots, storage.index_select(2, source_slots))
