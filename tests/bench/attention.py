"""Attention alone on one GPU, beside what its keys and values take to read.

    python -m tests.bench.attention

Heads of Llama-3.1-8B in bfloat16. Each case is one CUDA graph over the caches of several layers, as
many as a step meets cold. *Splits* and *whole* force one of the two kernels; *chosen* is what the
launcher takes, and what results are held against bit for bit.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from shared.kernels import attention_triton
from shared.kernels.attention import AttentionPlan, PagedRows, paged_attention, plan_attention
from shared.kv.batch import SequenceRows
from tests.bench.device_clock import copy_bandwidth, device_ms
from tests.helpers.attention_batches import Heads, chunk, packed, random_layer, tree, with_pages
from tests.load.figures import table

HEADS = Heads(32, 8, 128)
PAGE_SIZE = 16
CONTEXT = 600
# Of graphs, whose limit bounds how finely key lists may be cut.
MAX_CONTEXT = 131_072
_CACHE_BYTES = 2 * 10**9
_NEVER = 2**30


@dataclass(frozen=True, slots=True)
class Case:
    """Rows, and the caches of the layers that they attend to in turn."""

    rows: PagedRows
    queries: Tensor
    caches: tuple[tuple[Tensor, Tensor], ...]
    num_bytes: int

    def plan(self) -> AttentionPlan:
        groups = HEADS.num_groups
        return plan_attention(self.rows, sliding_window=None, num_query_groups=groups)

    def measure(self) -> tuple[float, Tensor]:
        """Returns microseconds a layer, and the last layer's result."""
        plan, results = self.plan(), []

        def attend() -> None:
            results[:] = [
                paged_attention(self.queries, *cache, plan, scale=HEADS.head_dim**-0.5)
                for cache in self.caches
            ]

        attend()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            attend()
        time_us = 1e3 * device_ms(graph.replay) / len(self.caches)
        return time_us, results[-1].clone()


def case(sequences: list[SequenceRows], device: torch.device) -> Case:
    """Places sequences and fills caches with random keys and values."""
    placed, num_slots = with_pages(random.Random(1), sequences, PAGE_SIZE)
    rows = replace(packed(placed, PAGE_SIZE, device), max_kv_length=MAX_CONTEXT)
    layer = random_layer(len(rows.positions), num_slots, HEADS, torch.bfloat16).to(device)
    num_layers = max(2, min(32, _CACHE_BYTES // (2 * layer.keys.nbytes)))
    caches = [
        (torch.randn_like(layer.keys), torch.randn_like(layer.keys)) for _ in range(num_layers)
    ]
    num_keys = sum(each.kv_start + len(each.token_ids) for each in sequences)
    num_bytes = 2 * num_keys * HEADS.num_kv_heads * HEADS.head_dim * 2
    return Case(rows, layer.queries, tuple(caches), num_bytes)


def cases() -> dict[str, Callable[[random.Random], list[SequenceRows]]]:
    """Returns what makes the sequences of each case, by name."""

    def trees(
        count: int, num_nodes: int, start: int = CONTEXT
    ) -> Callable[..., list[SequenceRows]]:
        return lambda rng: [tree(rng, start=start, num_nodes=num_nodes) for _ in range(count)]

    def tokens(count: int, start: int = CONTEXT) -> Callable[..., list[SequenceRows]]:
        return lambda _: [chunk(start, 1)] * count

    def chains(count: int) -> Callable[..., list[SequenceRows]]:
        return lambda _: [chunk(CONTEXT, 6)] * count

    return {
        **{f"plain, batch {count}": tokens(count) for count in (1, 8, 64)},
        **{f"chain of 6, batch {count}": chains(count) for count in (1, 8)},
        **{f"6 rows, batch {count}": trees(count, 6) for count in (1, 8)},
        **{f"32 rows, batch {count}": trees(count, 32) for count in (1, 8)},
        "plain, 32,000 tokens": tokens(1, 32_000),
        "63 plain beside one of 32,000": lambda _: [chunk(32_000, 1), *[chunk(CONTEXT, 1)] * 63],
        "32 rows, batch 8, 8,000 tokens": trees(8, 32, 8_000),
    }


def main() -> int:
    device, bandwidth, rows = torch.device("cuda"), copy_bandwidth(), []
    chosen = attention_triton.FEWEST_WHOLE
    for name, sequences in cases().items():
        one, times, results = case(sequences(random.Random(0)), device), [], []
        for fewest in (_NEVER, 0, chosen):
            attention_triton.FEWEST_WHOLE = fewest
            time_us, result = one.measure()
            times.append(f"{time_us:.1f}")
            results.append(result)
        assert all(torch.equal(result, results[-1]) for result in results), f"{name}: other bits"
        rows.append((name, *times, f"{1e3 * one.num_bytes / bandwidth:.1f}"))
    print(f"{torch.cuda.get_device_name()}, copy {bandwidth / 1e9:.2f} TB/s; microseconds a layer")
    print(table(("case", "splits", "whole", "chosen", "bytes alone"), rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
