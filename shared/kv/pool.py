"""Storage of the paged KV cache: one key and one value tensor for all layers, addressed by slot."""

from __future__ import annotations

import torch
from torch import Tensor

from shared.kv.layout import KvLayout


class KvPool:
    """Keys and values of all pages; slot = page * page_size + offset.

    Page 0 is never given to a sequence: it backs the padding of page tables and of fixed-size
    batches. Memory starts as zeros because masked slots are multiplied by zero, not skipped, and
    zero times an uninitialised NaN is NaN.

    Attributes:
        keys: one `[num_pages * page_size, num_kv_heads, head_dim]` tensor a layer.
        values: likewise.
    """

    def __init__(self, layout: KvLayout, num_pages: int, device: torch.device) -> None:
        assert num_pages >= 2, f"{num_pages} pages: page 0 is padding, so at least 2 are needed"
        shape = (
            2,
            layout.num_layers,
            num_pages * layout.page_size,
            layout.num_kv_heads,
            layout.head_dim,
        )
        self.layout = layout
        self.num_pages = num_pages
        self.device = device
        self._storage = torch.zeros(shape, dtype=layout.dtype, device=device)
        self.keys: tuple[Tensor, ...] = self._storage[0].unbind()
        self.values: tuple[Tensor, ...] = self._storage[1].unbind()

    @property
    def page_size(self) -> int:
        return self.layout.page_size

    def write(self, layer: int, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        """Stores `keys` and `values` `[T, num_kv_heads, head_dim]` at `slots` `[T]` int64."""
        self.keys[layer].index_copy_(0, slots, keys)
        self.values[layer].index_copy_(0, slots, values)

    def move(self, source_slots: Tensor, target_slots: Tensor) -> None:
        """Copies tokens between slots in every layer, as if all were read before any is written.

        Both are `[N]` int64 and may overlap; targets are distinct. Compacts the accepted path of
        a tree to the front of its tail. Costs a copy of the N tokens.
        """
        moved = self._storage.index_select(2, source_slots)
        self._storage.index_copy_(2, target_slots, moved)
