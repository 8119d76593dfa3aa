"""The layout of one token's keys and values in the pool."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class KvLayout:
    """Shape of the KV cache of one decoder.

    Attributes:
        page_size: tokens a page.
        dtype: dtype of keys and values.
        has_values: values are stored beside keys; else they are the first part of the keys.
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    page_size: int
    dtype: torch.dtype
    has_values: bool = True

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
