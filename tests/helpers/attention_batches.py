"""Batches for attention kernels: chunks, plain tokens and trees over a scattered page table."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from shared.kv.batch import ForwardBatch, SequenceRows, build_batch


@dataclass(frozen=True, slots=True)
class Heads:
    """Heads of one attention layer."""

    num_heads: int
    num_kv_heads: int
    head_dim: int

    @property
    def num_groups(self) -> int:
        return self.num_heads // self.num_kv_heads


@dataclass(frozen=True, slots=True)
class Layer:
    """Queries of T rows and the cache they attend to, on one device."""

    queries: Tensor
    keys: Tensor
    values: Tensor

    def to(self, device: torch.device) -> Layer:
        return Layer(self.queries.to(device), self.keys.to(device), self.values.to(device))


def random_layer(num_rows: int, num_slots: int, heads: Heads, dtype: torch.dtype) -> Layer:
    """Returns a layer of normally distributed numbers."""
    generator = torch.Generator().manual_seed(num_rows)

    def draw(count: int, num_heads: int) -> Tensor:
        return torch.randn((count, num_heads, heads.head_dim), generator=generator).to(dtype)

    return Layer(
        draw(num_rows, heads.num_heads),
        draw(num_slots, heads.num_kv_heads),
        draw(num_slots, heads.num_kv_heads),
    )


def chunk(start: int, num_rows: int) -> SequenceRows:
    """Returns causal rows behind `start` cached tokens, without pages yet."""
    return SequenceRows(
        token_ids=[0] * num_rows,
        positions=range(start, start + num_rows),
        kv_start=start,
        pages=(),
        prefix_length=start,
        tail_mask=None,
        logit_rows=(),
    )


def tree(rng: random.Random, *, start: int, num_nodes: int, num_cached: int = 0) -> SequenceRows:
    """Returns the nodes of a random tree behind `start` cached tokens, the first ones cached."""
    masks: list[list[bool]] = []
    for node in range(num_nodes):
        parent = rng.choice([None, *range(node)])
        mask = [False] * num_nodes if parent is None else list(masks[parent])
        mask[node] = True
        masks.append(mask)
    return SequenceRows(
        token_ids=[0] * (num_nodes - num_cached),
        positions=[start + sum(mask) - 1 for mask in masks[num_cached:]],
        kv_start=start + num_cached,
        pages=(),
        prefix_length=start,
        tail_mask=masks[num_cached:],
        logit_rows=(),
    )


def with_pages(
    rng: random.Random, sequences: list[SequenceRows], page_size: int
) -> tuple[list[SequenceRows], int]:
    """Gives every sequence its own pages in random order; also returns the number of slots."""
    needed = [-(-(rows.kv_start + len(rows.token_ids)) // page_size) for rows in sequences]
    pages = rng.sample(range(1, sum(needed) + 1), sum(needed))
    placed = []
    for rows, count in zip(sequences, needed, strict=True):
        placed.append(replace(rows, pages=pages[:count]))
        pages = pages[count:]
    return placed, (sum(needed) + 1) * page_size


def packed(sequences: list[SequenceRows], page_size: int, device: torch.device) -> ForwardBatch:
    """Packs sequences that have pages."""
    return build_batch(sequences, page_size=page_size, device=device)
