"""Products of few rows on one GPU: the library's, and the one that keeps a row's bits.

    python -m tests.bench.products

Matrices of Llama-3.1-8B in bfloat16, and of its half on each of two GPUs. Each case is one CUDA
graph over as many matrices as the cache does not hold. *Parts* leaves the sums over the depth to
the next kernel, and the product of gates and values computes SwiGLU as well, which the library's
does not.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from shared.kernels.linear import LinearWeight, gated_linear, linear_partials
from tests.bench.device_clock import copy_bandwidth, device_ms
from tests.load.figures import table

SIZES = {
    "queries, keys, values": (6144, 4096),
    "attention's output": (4096, 4096),
    "gates and values": (28672, 4096),
    "down": (4096, 14336),
    "vocabulary": (128_256, 4096),
    "half of queries, keys, values": (3072, 4096),
    "half of attention's output": (4096, 2048),
    "half of gates and values": (14336, 4096),
    "half of down": (4096, 7168),
}
COUNTS = (1, 6, 32, 64)
_MOST_BYTES = 2 * 10**9


def microseconds(product: Callable[[Tensor], object], weights: list[Tensor]) -> float:
    """Returns the time of one product of several in a CUDA graph."""

    def products() -> None:
        for weight in weights:
            product(weight)

    products()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        products()
    return 1e3 * device_ms(graph.replay) / len(weights)


def row(name: str, channels: int, depth: int, bandwidth: float) -> tuple[str, ...]:
    """Measures one matrix with several numbers of rows."""
    device = torch.device("cuda")
    size_bytes = 2 * channels * depth
    count = max(3, min(24, _MOST_BYTES // size_bytes))
    weights = [
        torch.randn(channels, depth, device=device).mul_(0.02).to(torch.bfloat16)
        for _ in range(count)
    ]
    prepared = {weight: LinearWeight.prepare(weight) for weight in weights}
    ours = gated_linear if "gates" in name else linear_partials
    cells = []
    for num_rows in COUNTS:
        inputs = torch.randn(num_rows, depth, device=device).to(torch.bfloat16)
        library = microseconds(lambda weight, rows=inputs: F.linear(rows, weight), weights)
        own = microseconds(lambda weight, rows=inputs: ours(rows, prepared[weight]), weights)
        cells.append(f"{library:.1f} / {own:.1f}")
    return name, *cells, f"{1e3 * size_bytes / bandwidth:.1f}"


def main() -> int:
    bandwidth = copy_bandwidth()
    rows = [row(name, *size, bandwidth) for name, size in SIZES.items()]
    print(f"{torch.cuda.get_device_name()}, copy {bandwidth / 1e9:.2f} TB/s; microseconds")
    heads = (f"{count} rows: library / parts" for count in COUNTS)
    print(table(("product", *heads, "bytes alone"), rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
